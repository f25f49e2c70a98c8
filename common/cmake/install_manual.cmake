# Run by cmake --install, with PROGRAMS, SOURCE_FOLDER, BUILD_FOLDER and MANUAL_FOLDER set.
find_program(HELP2MAN help2man)
if(NOT HELP2MAN)
  message(STATUS "Pages of the manual are left out: help2man is not installed (apt-get install help2man)")
  return()
endif()
foreach(program IN LISTS PROGRAMS)
  get_filename_component(name ${program} NAME)
  set(page ${BUILD_FOLDER}/manual/${name}.1)
  file(MAKE_DIRECTORY ${BUILD_FOLDER}/manual)
  # By a relative path: help2man passes it to a shell, which would cut it at a blank.
  execute_process(COMMAND ${CMAKE_COMMAND} -E env PROGRAM=${program} ${HELP2MAN} --no-info --output=${page}
                          "--name=a stage of the course on PagedAttention" ./manual.sh
                  WORKING_DIRECTORY ${SOURCE_FOLDER}/common/app COMMAND_ERROR_IS_FATAL ANY)
  file(INSTALL ${page} DESTINATION ${CMAKE_INSTALL_PREFIX}/${MANUAL_FOLDER}/man1)
endforeach()
