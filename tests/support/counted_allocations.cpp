#include "tests/support/counted_allocations.h"

namespace tests {

bool counts_allocations = false;
int allocations_until_failure = -1;

bool allocation_fails() {
  return counts_allocations && allocations_until_failure >= 0 && allocations_until_failure-- == 0;
}

}  // namespace tests
