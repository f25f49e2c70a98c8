# Precompiled headers: parsing Eigen takes longer than compiling most files that use it.
#
# The files of common/ are compiled several at a time as well, because nlohmann-json and the standard library take long
# to parse, too. (A stage's files are not: readers change them.)
#
# Every file still has to include what it uses; a build with COURSE_PRECOMPILE=OFF checks that.

# Lets a library or program of the course use the precompiled Eigen, which all of them share.
function(course_precompile_eigen target)
  if(NOT COURSE_PRECOMPILE)
    return()
  endif()
  if(TARGET course_eigen)
    target_precompile_headers(${target} REUSE_FROM course_eigen)
  endif()
endfunction()

# Compiles a library's files six at a time, except files with options of their own.
function(course_compile_together target)
  if(COURSE_PRECOMPILE)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 6)
    # gcc takes a file that is included for a header, whose anonymous namespace would be another one in each use.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
  endif()
endfunction()

if(COURSE_PRECOMPILE)
  file(WRITE ${PROJECT_BINARY_DIR}/eigen.cpp "")
  add_library(course_eigen STATIC ${PROJECT_BINARY_DIR}/eigen.cpp)
  target_link_libraries(course_eigen PRIVATE Eigen3::Eigen Threads::Threads)
  target_precompile_headers(course_eigen PRIVATE $<$<COMPILE_LANGUAGE:CXX>:<Eigen/Core$<ANGLE-R>>)
endif()
