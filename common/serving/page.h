// The page that shows the pool, compiled in: page/page.html with its style sheet and its scripts, as one document.
#pragma once

#include <string>

namespace common {

std::string page();

}  // namespace common
