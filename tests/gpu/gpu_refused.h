// Calls of kernels that have to be refused.
#pragma once

#include <functional>

#include "common/base/check.h"
#include "tests/support/catch.h"

namespace tests {

// Checks that a call is refused before anything is launched: wrong(what, plan_too, change) changes a copy of the right
// call; plan_too: the plan must be refused as well. All three must outlive the checks.
template <typename Call, typename Plan, typename Attend>
auto refused(const Call& right, const Plan& plan, const Attend& attend) {
  return [&](const char* what, bool plan_too, const std::function<void(Call&)>& change) {
    CAPTURE(what);
    Call call = right;
    change(call);
    CHECK_THROWS_AS(attend(call), common::CheckError);
    if (plan_too) {
      CHECK_THROWS_AS(plan(call), common::CheckError);
    }
  };
}

}  // namespace tests
