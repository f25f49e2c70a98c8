# cmake --install build: the programs, their completions for bash, zsh and fish, and, where there is help2man, their
# pages of the manual.
include(GNUInstallDirs)

function(course_install stage)
  install(TARGETS ${stage})
  set_target_properties(${stage} PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)  # CUDA's libraries

  foreach(shell IN ITEMS bash zsh fish)
    configure_file(${PROJECT_SOURCE_DIR}/common/app/completions/stage.${shell} completions/${stage}.${shell} @ONLY)
  endforeach()
  set(folder ${CMAKE_CURRENT_BINARY_DIR}/completions)
  install(FILES ${folder}/${stage}.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME ${stage})
  install(FILES ${folder}/${stage}.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _${stage})
  install(FILES ${folder}/${stage}.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endfunction()

function(course_install_manual)
  get_property(stages GLOBAL PROPERTY COURSE_STAGES)
  list(TRANSFORM stages REPLACE "(.+)" "$<TARGET_FILE:stage\\1>" OUTPUT_VARIABLE programs)
  install(CODE "set(PROGRAMS \"${programs}\")
set(SOURCE_FOLDER \"${PROJECT_SOURCE_DIR}\")
set(BUILD_FOLDER \"${PROJECT_BINARY_DIR}\")
set(MANUAL_FOLDER \"${CMAKE_INSTALL_MANDIR}\")")
  install(SCRIPT ${PROJECT_SOURCE_DIR}/common/cmake/install_manual.cmake)
endfunction()
