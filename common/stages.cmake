# What a stage is to the build: a library, a program, and a link by which the tests include its headers.

# add_stage(stage3_online_softmax): called by a stage's CMakeLists.txt, whose one line it is.
#
#   stage3_lib   every .cpp of the folder but main.cpp
#   stage3       main.cpp; the program lands at the top of the build folder
#   build/stages/stage3 -> the folder, so that tests say #include "stage3/attention.h" wherever the sources lie
#
# -DSTAGE3_DIR=path builds that folder in place of the original one: for a reader's own version of a stage.
function(add_stage folder)
  if(NOT folder MATCHES "^stage([0-9]+)_")
    message(FATAL_ERROR "add_stage: '${folder}' is not of the form stage<number>_<name>")
  endif()
  set(number ${CMAKE_MATCH_1})
  set(stage stage${number})
  set(directory ${PROJECT_SOURCE_DIR}/${folder})
  if(STAGE${number}_DIR)
    get_filename_component(directory ${STAGE${number}_DIR} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
    if(NOT EXISTS ${directory}/main.cpp)
      message(FATAL_ERROR "STAGE${number}_DIR: there is no main.cpp in ${directory}")
    endif()
    message(STATUS "Stage ${number} is built from ${directory}")
  endif()

  file(MAKE_DIRECTORY ${PROJECT_BINARY_DIR}/stages)
  file(CREATE_LINK ${directory} ${PROJECT_BINARY_DIR}/stages/${stage} SYMBOLIC)

  file(GLOB sources CONFIGURE_DEPENDS ${directory}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/main\\.cpp$")
  # What is in these folders needs CUDA, whatever the language.
  if(TARGET course_cuda)
    set(kernels "")
    foreach(subfolder kernels ladder bench)
      file(GLOB found CONFIGURE_DEPENDS ${directory}/${subfolder}/*.cu ${directory}/${subfolder}/*.cpp)
      list(APPEND kernels ${found})
    endforeach()
    list(APPEND sources ${kernels})
  endif()

  add_library(${stage}_lib STATIC ${sources})
  target_include_directories(${stage}_lib PUBLIC ${PROJECT_BINARY_DIR}/stages)
  target_link_libraries(${stage}_lib PUBLIC common PRIVATE course_warnings)
  if(kernels)
    target_link_libraries(${stage}_lib PUBLIC course_cuda)
  endif()
  # The path is part of every dependent's command line, so that another STAGE<N>_DIR rebuilds them: file times alone
  # would not, when the other folder's headers are older than the objects.
  target_compile_definitions(${stage}_lib PUBLIC STAGE${number}_SOURCE_DIR="${directory}")

  add_executable(${stage} ${directory}/main.cpp)
  target_compile_definitions(${stage} PRIVATE STAGE_NAME="${stage}")
  set_target_properties(${stage} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_link_libraries(${stage} PRIVATE ${stage}_lib course_warnings)

  set_property(GLOBAL APPEND PROPERTY COURSE_STAGES ${number})
endfunction()

# Adds every stage folder there is, in order of its number.
function(course_add_stages)
  file(GLOB lists CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/stage[0-9]*_*/CMakeLists.txt)
  list(SORT lists COMPARE NATURAL)
  foreach(list_file IN LISTS lists)
    get_filename_component(directory ${list_file} DIRECTORY)
    add_subdirectory(${directory})
  endforeach()
endfunction()

# Turns CUDA on if a stage has kernels and a compiler for them is there. Says in one line what was left out.
macro(course_find_cuda)
  file(GLOB course_kernels CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/stage[0-9]*_*/kernels/*.cu)
  # Sanitizers are for the CPU's code; compute-sanitizer looks at the kernels of an ordinary build.
  if(course_kernels AND COURSE_CUDA AND NOT COURSE_SANITIZE)
    # A fixed list: "native" is an error on a machine that has nvcc but no GPU. 80: A100; 90a: H100 and H200.
    if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
      set(CMAKE_CUDA_ARCHITECTURES "80;90a" CACHE STRING "GPU architectures to compile kernels for")
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
      execute_process(COMMAND nvidia-smi -L RESULT_VARIABLE course_gpu_status OUTPUT_QUIET ERROR_QUIET)
      if(course_gpu_status EQUAL 0)
        message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, kernels are built for ${CMAKE_CUDA_ARCHITECTURES}")
      else()
        message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, kernels are built for ${CMAKE_CUDA_ARCHITECTURES};"
                       " no GPU here, so their tests will be skipped")
      endif()
    elseif(COURSE_CUDA STREQUAL "AUTO")
      message(STATUS "CUDA: nvcc not found; the kernels are left out")
    else()
      message(FATAL_ERROR "COURSE_CUDA is ON and nvcc was not found. Put it on the PATH or set CUDACXX to it.")
    endif()
  elseif(course_kernels)
    message(STATUS "CUDA: switched off (COURSE_CUDA or COURSE_SANITIZE); the kernels are left out")
  else()
    message(STATUS "CUDA: no stage here has kernels, so nvcc is not looked for")
  endif()
endmacro()

# `course`: builds every stage, runs each on the fixed workload and prints one table.
function(course_add_course_target)
  get_property(stages GLOBAL PROPERTY COURSE_STAGES)
  set(programs "")
  foreach(number IN LISTS stages)
    list(APPEND programs $<TARGET_FILE:stage${number}>)
  endforeach()
  set(depends ${stages})
  list(TRANSFORM depends PREPEND stage)
  add_custom_target(course
    COMMAND course_runner --golden ${PROJECT_SOURCE_DIR}/tests/golden_greedy.json ${programs}
    DEPENDS course_runner ${depends}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    COMMENT "Running every stage on the same prompts"
    USES_TERMINAL VERBATIM)
endfunction()
