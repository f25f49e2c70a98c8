# Kernels without a GPU: the host's compiler compiles them, and common/cuda/executor runs them.

# Adds course_executor: the executor, and the part of common/cuda/runtime that kernels are launched with. Boost.Context
# switches between a kernel's threads.
function(course_add_executor)
  find_package(Boost 1.74 QUIET CONFIG COMPONENTS context)
  if(NOT TARGET Boost::context)
    message(STATUS "Boost.Context: not found, so kernels are not run without a GPU (Debian and Ubuntu: libboost-context-dev)")
    return()
  endif()
  set(cuda ${PROJECT_SOURCE_DIR}/common/cuda)
  file(GLOB sources CONFIGURE_DEPENDS ${cuda}/executor/*.cpp)
  set(probe ${PROJECT_BINARY_DIR}/on_host/probe.cpp)
  file(CONFIGURE OUTPUT ${probe} CONTENT "#include \"${cuda}/runtime/probe.cu\"\n")
  add_library(course_executor STATIC ${sources} ${probe} ${cuda}/runtime/device.cpp ${cuda}/runtime/launch.cpp
              ${cuda}/runtime/pinned.cpp)
  # In place of the toolkit's headers.
  target_include_directories(course_executor BEFORE PUBLIC ${cuda}/executor/include)
  target_compile_definitions(course_executor PRIVATE COURSE_CUDA_ARCHITECTURES="the executor")
  target_link_libraries(course_executor PUBLIC common PRIVATE Boost::context course_warnings)
  # Boost 1.74 asks LLVM's library for a trait that C++20 has dropped.
  target_compile_definitions(course_executor PRIVATE _LIBCPP_ENABLE_CXX20_REMOVED_TYPE_TRAITS)
  if(COURSE_SANITIZE MATCHES thread)
    # A thread of a kernel is no thread to this sanitizer, and it would take the functions that count accesses for itself.
    target_compile_options(course_executor PRIVATE -fno-sanitize=thread)
  elseif(NOT COURSE_SANITIZE)
    target_compile_definitions(course_executor PRIVATE COURSE_COUNTED)
  endif()
endfunction()

# course_add_host_kernels(stage7_on_host /path/step1_naive.cu …): these files for the executor. Each is included by a
# .cpp, since CMake would give a .cu to nvcc.
function(course_add_host_kernels name)
  set(sources "")
  foreach(file IN LISTS ARGN)
    if(file MATCHES "\\.cu$")
      get_filename_component(base ${file} NAME_WE)
      set(source ${PROJECT_BINARY_DIR}/on_host/${name}_${base}.cpp)
      file(CONFIGURE OUTPUT ${source} CONTENT "#include \"${file}\"\n")
    else()
      set(source ${file})
    endif()
    list(APPEND sources ${source})
  endforeach()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC course_executor)
  target_include_directories(${name} PUBLIC ${PROJECT_BINARY_DIR}/stages)
  target_compile_options(${name} PRIVATE -Wno-unknown-pragmas -fno-strict-aliasing)
  # The compiler reports each access (common/cuda/executor/counts.h). -O2: the same accesses in every kind of build.
  if(COURSE_SANITIZE MATCHES thread)
    target_compile_options(${name} PRIVATE -fno-sanitize=thread)
  elseif(NOT COURSE_SANITIZE)
    target_compile_options(${name} PRIVATE -O2 -fno-tree-vectorize -fno-tree-slp-vectorize -fsanitize=thread
                                           -fno-threadsafe-statics)
  endif()
endfunction()

# course_paged_on_host: common/paged/ for the executor, which has no wgmma: kernels with wgmma are never chosen.
function(course_add_paged_on_host)
  file(GLOB sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/common/paged/*.cu ${PROJECT_SOURCE_DIR}/common/paged/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/shared_reading\\.cpp$")  # part of common
  course_add_host_kernels(course_paged_on_host ${sources})
  target_compile_definitions(course_paged_on_host PUBLIC COURSE_PRODUCTION)
endfunction()
