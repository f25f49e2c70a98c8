// The page that shows the pool: page.html, compiled in.
#pragma once

#include <string_view>

namespace common {

std::string_view page();

}  // namespace common
