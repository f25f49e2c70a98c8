// For the executor, in place of the CUDA Toolkit's header of this name.
#pragma once

#include "common/cuda/executor/small_floats.h"
