// The page that shows the pool: page.html, compiled in.
#pragma once

#include <string_view>

namespace stage8 {

std::string_view page();

}  // namespace
