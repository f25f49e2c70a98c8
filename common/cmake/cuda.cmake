# Whether the kernels are part of this build, and for which GPU.

# The compute capabilities of this machine's GPUs, "8.9;9.0" for two kinds: usable ones, from 8.0 on, and those too old
# for the kernels.
function(course_find_gpus usable too_old)
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
                  OUTPUT_VARIABLE found RESULT_VARIABLE status ERROR_QUIET)
  set(new "")
  set(old "")
  if(status EQUAL 0)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" found "${found}")
    list(REMOVE_DUPLICATES found)
    set(new ${found})
    list(FILTER new EXCLUDE REGEX "^[0-7]\\.")
    set(old ${found})
    list(FILTER old INCLUDE REGEX "^[0-7]\\.")
  endif()
  set(${usable} "${new}" PARENT_SCOPE)
  set(${too_old} "${old}" PARENT_SCOPE)
endfunction()

# What nvcc calls them: 8.9 is 89, 9.0 is 90a. From 9.0 on, kernels use instructions that only this one architecture has
# ("a").
function(course_architectures capabilities result)
  set(architectures "")
  foreach(capability IN LISTS capabilities)
    string(REPLACE "." "" architecture ${capability})
    if(architecture GREATER_EQUAL 90)
      string(APPEND architecture a)
    endif()
    list(APPEND architectures ${architecture})
  endforeach()
  set(${result} "${architectures}" PARENT_SCOPE)
endfunction()

# Enables CUDA if a stage has kernels and they can run here, or if COURSE_CUDA is ON. One line of output says what is
# left out and how to include it.
macro(course_find_cuda)
  file(GLOB course_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/stage[0-9]*_*/kernels/*.cu)
  course_find_gpus(course_gpu course_old_gpu)
  # These sanitizers check CPU code; for kernels there is compute-sanitizer, which needs no special build.
  if(NOT course_kernels)
    message(STATUS "CUDA: no stage here has kernels, so nvcc is not looked for")
  elseif(NOT COURSE_CUDA OR COURSE_SANITIZE)
    message(STATUS "CUDA: switched off (COURSE_CUDA or COURSE_SANITIZE); the kernels are left out")
  elseif(COURSE_CUDA STREQUAL "AUTO" AND course_old_gpu AND NOT course_gpu)
    message(STATUS "CUDA: the GPU here has compute capability ${course_old_gpu} and the kernels need 8.0 or newer; they"
                   " are left out and stages 7 and 8 compute on the CPU")
  elseif(COURSE_CUDA STREQUAL "AUTO" AND NOT course_gpu)
    message(STATUS "CUDA: no GPU here, so the kernels are left out and stages 7 and 8 compute on the CPU."
                   " To compile them anyway: cmake --workflow --preset cuda")
  else()
    # The architectures of this machine's GPUs, or else of H100 and H200.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      set(course_architectures 90a)
      if(course_gpu)
        course_architectures("${course_gpu}" course_architectures)
      endif()
      set(CMAKE_CUDA_ARCHITECTURES "${course_architectures}" CACHE STRING "GPU architectures to compile kernels for")
    endif()
    include(CheckLanguage)
    check_language(CUDA)
    if(CMAKE_CUDA_COMPILER)
      enable_language(CUDA)
      # CMake 3.25 knows nvcc's dialect options up to C++17 only; nvcc has had C++20 since version 12.
      if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
        set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
        set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
      endif()
      set(CMAKE_CUDA_STANDARD 20)
      set(CMAKE_CUDA_STANDARD_REQUIRED ON)
      find_package(CUDAToolkit REQUIRED)
      if(COURSE_CCACHE AND NOT DEFINED CMAKE_CUDA_COMPILER_LAUNCHER)
        set(CMAKE_CUDA_COMPILER_LAUNCHER ${COURSE_CCACHE})
      endif()
      add_subdirectory(common/cuda)
      if(COURSE_PRODUCTION)
        add_subdirectory(common/paged)
      endif()
      if(course_gpu)
        set(course_gpu_note "")
      else()
        set(course_gpu_note "; no GPU here that they run on, so their tests will be skipped")
      endif()
      message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, kernels are built for "
                     "${CMAKE_CUDA_ARCHITECTURES}${course_gpu_note}")
    elseif(COURSE_CUDA STREQUAL "AUTO")
      message(STATUS "CUDA: there is a GPU here, but no nvcc; the kernels are left out and stages 7 and 8 compute on the"
                     " CPU. With the CUDA Toolkit installed, put nvcc on the PATH or set CUDACXX to it.")
    else()
      message(FATAL_ERROR "COURSE_CUDA is ON and nvcc was not found. Put it on the PATH or set CUDACXX to it.")
    endif()
  endif()
endmacro()
