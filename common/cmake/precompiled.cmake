# Precompiled headers: parsing Eigen takes longer than compiling most files that use it.
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

if(COURSE_PRECOMPILE)
  file(WRITE ${PROJECT_BINARY_DIR}/eigen.cpp "")
  add_library(course_eigen STATIC ${PROJECT_BINARY_DIR}/eigen.cpp)
  target_link_libraries(course_eigen PRIVATE Eigen3::Eigen Threads::Threads)
  target_precompile_headers(course_eigen PRIVATE $<$<COMPILE_LANGUAGE:CXX>:<Eigen/Core$<ANGLE-R>>)
endif()
