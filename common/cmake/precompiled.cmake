# Precompiled headers: parsing Eigen takes longer than compiling most files that use it. nlohmann-json is not in there: it
# costs each file half a second to a second and a half, and few files use it.
#
# The files of common/ are compiled several at a time as well, because the standard library takes long to parse, too. (A
# stage's files are not: readers change them.)
#
# Every file still has to include what it uses; a build with COURSE_PRECOMPILE=OFF checks that.

# Lets a library or program of the course use the precompiled headers, which all of them share.
function(course_precompile_eigen target)
  if(NOT COURSE_PRECOMPILE)
    return()
  endif()
  if(TARGET course_eigen)
    target_precompile_headers(${target} REUSE_FROM course_eigen)
  endif()
endfunction()

# Compiles a library's files six at a time, except those that have COMPILE_DEFINITIONS, COMPILE_OPTIONS or
# SKIP_UNITY_BUILD_INCLUSION, which must be set before. (CMake's UNITY_BUILD does the same with absolute paths, so that a
# compiler cache finds nothing of another folder.)
function(course_compile_together target)
  if(NOT COURSE_PRECOMPILE)
    return()
  endif()
  set(files "")
  set(apart "")
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    get_source_file_property(definitions ${source} COMPILE_DEFINITIONS)
    get_source_file_property(options ${source} COMPILE_OPTIONS)
    get_source_file_property(is_skipped ${source} SKIP_UNITY_BUILD_INCLUSION)
    if(definitions OR options OR is_skipped)
      list(APPEND apart ${source})
    else()
      file(RELATIVE_PATH path ${PROJECT_SOURCE_DIR} ${source})
      list(APPEND files "#include \"${path}\"\n")
    endif()
  endforeach()
  list(LENGTH files num_files)
  foreach(first RANGE 0 ${num_files} 6)
    if(first LESS num_files)
      list(SUBLIST files ${first} 6 lines)
      list(JOIN lines "" text)
      set(together ${CMAKE_CURRENT_BINARY_DIR}/${target}_${first}.cpp)
      file(CONFIGURE OUTPUT ${together} CONTENT "${text}" @ONLY)
      list(APPEND apart ${together})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${apart}")
  # gcc takes a file that is included for a header, whose anonymous namespace would be another one in each use.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()

if(COURSE_PRECOMPILE)
  file(WRITE ${PROJECT_BINARY_DIR}/eigen.cpp "")
  add_library(course_eigen STATIC ${PROJECT_BINARY_DIR}/eigen.cpp)
  target_link_libraries(course_eigen PRIVATE Eigen3::Eigen Threads::Threads)
  target_precompile_headers(course_eigen PRIVATE $<$<COMPILE_LANGUAGE:CXX>:<Eigen/Core$<ANGLE-R>>)
endif()
