// For the executor, in place of the CUDA Toolkit's header of this name.
#pragma once

#include "common/cuda/executor/cuda_on_host.h"
