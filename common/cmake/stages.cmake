# A stage in the build: a library, a program, and a link through which tests include its headers.

# add_stage(stage3_online_softmax): the only line of a stage's CMakeLists.txt.
#
#   stage3_lib   every .cpp of the folder, of demo/ and of serve/, but main.cpp, and of production/'s own folders; with CUDA,
#                kernels/ too, all of production/, and common/paged/. With COURSE_PRODUCTION OFF nothing of production/ and of
#                common/paged/
#   stage3       main.cpp; the program lands at the top of the build folder
#   build/stages/stage3 -> the folder, so that tests write #include "stage3/attention.h" wherever the sources are
#
# -DSTAGE3_DIR=path builds that folder in place of the original one, which may be missing: for a reader's own version of
# a stage.
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

  file(GLOB sources CONFIGURE_DEPENDS ${directory}/*.cpp ${directory}/demo/*.cpp ${directory}/serve/*.cpp)
  list(FILTER sources EXCLUDE REGEX "/main\\.cpp$")
  set(kernels "")
  if(TARGET course_cuda)
    # Everything in these folders needs CUDA, .cpp files too.
    file(GLOB kernels CONFIGURE_DEPENDS ${directory}/kernels/*.cu ${directory}/kernels/*.cpp)
    if(COURSE_PRODUCTION)
      file(GLOB production CONFIGURE_DEPENDS ${directory}/production/*.cu ${directory}/production/*.cpp)
      list(APPEND kernels ${production})
    endif()
  endif()
  set(host_production "")
  if(COURSE_PRODUCTION)
    # What needs no CUDA there has a folder of its own.
    file(GLOB host_production CONFIGURE_DEPENDS ${directory}/production/*/*.cpp)
  endif()

  add_library(${stage}_lib STATIC ${sources} ${kernels} ${host_production})
  target_include_directories(${stage}_lib PUBLIC ${PROJECT_BINARY_DIR}/stages)
  target_link_libraries(${stage}_lib PUBLIC common PRIVATE course_warnings)
  course_precompile_eigen(${stage}_lib)
  if(number GREATER 7)  # from here on there is an engine to serve with
    target_link_libraries(${stage}_lib PUBLIC common_serving)
  endif()
  if(kernels)
    target_link_libraries(${stage}_lib PUBLIC course_cuda)
  endif()
  if(kernels AND TARGET course_paged)
    target_link_libraries(${stage}_lib PUBLIC course_paged)
  endif()
  if(host_production)
    target_compile_definitions(${stage}_lib PUBLIC COURSE_PRODUCTION)
  endif()
  # The ladder of kernels, for tests and benchmarks: no program of a stage needs it. Its last rows are kernels of
  # common/paged/.
  file(GLOB steps CONFIGURE_DEPENDS ${directory}/ladder/*.cu ${directory}/ladder/*.cpp)
  if(steps)  # whose measurements a picture shows
    set_source_files_properties(${directory}/demo/pictures.cpp PROPERTIES
      COMPILE_DEFINITIONS STAGE_SOURCE_DIR="${directory}")
  endif()
  if(NOT COURSE_PRODUCTION)
    list(FILTER steps EXCLUDE REGEX "/(prompt_)?production\\.cu$")
  endif()
  if(kernels AND steps)
    add_library(${stage}_ladder STATIC ${steps})
    target_link_libraries(${stage}_ladder PUBLIC ${stage}_lib PRIVATE course_warnings)
  endif()
  # The kernels for machines without a GPU: the lesson's and the ladder's. (common/paged/ has course_paged_on_host.)
  if(steps AND TARGET course_executor)
    file(GLOB on_host CONFIGURE_DEPENDS ${directory}/kernels/*.cu ${directory}/ladder/*.cu ${directory}/ladder/*.cpp)
    list(FILTER on_host EXCLUDE REGEX "/(prompt_)?production\\.cu$")
    course_add_host_kernels(${stage}_on_host ${on_host})
  endif()
  # Puts the path into the command line of every dependent, so that a change of STAGE<N>_DIR rebuilds them. File times
  # do not, if the other folder's headers are older than the objects. Relative, so that commands are the same in every
  # checkout, for a compiler cache.
  file(RELATIVE_PATH relative ${PROJECT_SOURCE_DIR} ${directory})
  target_compile_definitions(${stage}_lib PUBLIC STAGE${number}_SOURCE_DIR="${relative}")

  add_executable(${stage} ${directory}/main.cpp)
  target_compile_definitions(${stage} PRIVATE STAGE_NAME="${stage}")
  set_target_properties(${stage} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_link_libraries(${stage} PRIVATE ${stage}_lib course_warnings)
  course_precompile_eigen(${stage})
  course_install(${stage})

  set_property(GLOBAL APPEND PROPERTY COURSE_STAGES ${number})
endfunction()

# Adds all stages in order of their numbers: the folders in this repository, and a reader's own if one is missing.
function(course_add_stages)
  file(GLOB lists CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/stage[0-9]*_*/CMakeLists.txt)
  set(folders "")
  foreach(list_file IN LISTS lists)
    get_filename_component(directory ${list_file} DIRECTORY)
    get_filename_component(folder ${directory} NAME)
    list(APPEND folders ${folder})
  endforeach()
  get_cmake_property(variables VARIABLES)
  foreach(variable IN LISTS variables)
    if(NOT variable MATCHES "^STAGE([0-9]+)_DIR$")
      continue()
    endif()
    set(stage stage${CMAKE_MATCH_1})
    if(${variable} AND NOT "${folders}" MATCHES "${stage}_")
      list(APPEND folders ${stage}_own)
    endif()
  endforeach()
  list(SORT folders COMPARE NATURAL)
  foreach(folder IN LISTS folders)
    if(EXISTS ${PROJECT_SOURCE_DIR}/${folder}/CMakeLists.txt)
      add_subdirectory(${folder})
    else()
      add_stage(${folder})
    endif()
  endforeach()
endfunction()

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
    COMMAND Python3::Interpreter ${PROJECT_SOURCE_DIR}/common/app/course.py
            ${PROJECT_SOURCE_DIR}/tests/golden/golden_greedy.json ${programs}
    DEPENDS ${depends}
    WORKING_DIRECTORY ${PROJECT_SOURCE_DIR}
    COMMENT "Running every stage on the same prompts"
    USES_TERMINAL VERBATIM)
endfunction()
