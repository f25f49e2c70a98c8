// Takes the place of operator new in a test program that links failing_allocations: an allocation fails where the
// program's allocation_fails() says so. Not under sanitizers, which have an operator new of their own.
#pragma once

namespace tests {

// Whether this allocation fails: asked at each one, by its thread. Every program defines its own.
bool allocation_fails();

}  // namespace tests
