# The widgets of the course's site: build/site/widgets/.

# The files of a stage and of common/ that a widget needs, besides the stage's demo/scene.cpp. common/app/scene.cpp and
# the like go into every stage's file.
set(course_scene_common app/scene base/check base/text base/utf8 app/words)
set(course_scene_stage1 kv_cache_manager)
set(course_scene_stage2 kv_cache_manager)
set(course_scene_stage3 attention)
set(course_scene_common_stage3 math/product)
set(course_scene_stage5 kv_cache_manager)
set(course_scene_stage6 kv_cache_manager prefix_cache)
set(course_scene_common_stage6 base/hash)
set(course_scene_stage8 kv_cache_manager prefix_cache scheduler decoding)
set(course_scene_common_stage8 base/hash math/sampling model/generation model/stop_strings)

# site_widgets: widgets.js, the scenes that the stages' programs record, and, where there is Emscripten, the stages' own
# code as WebAssembly. Without it the widgets show the recorded scenes and say so.
function(course_add_site_widgets)
  set(folder ${PROJECT_BINARY_DIR}/site/widgets)
  set(widgets ${PROJECT_SOURCE_DIR}/common/site/widgets)
  # The build looks into these folders anew each time, and configures again when em++ has come or gone.
  cmake_path(CONVERT "$ENV{PATH}" TO_CMAKE_PATH_LIST places)
  list(TRANSFORM places APPEND /em++)
  file(GLOB places CONFIGURE_DEPENDS ${places})
  if(NOT EXISTS "${COURSE_EMCXX}")
    unset(COURSE_EMCXX CACHE)
  endif()
  find_program(COURSE_EMCXX em++)
  mark_as_advanced(COURSE_EMCXX)
  if(NOT COURSE_EMCXX)
    message(STATUS "Widgets: em++ not found, so the site shows recorded scenes (Debian and Ubuntu: emscripten)")
  endif()

  set(programs "")
  set(compiled "")
  set(files "")
  set(depends "")
  get_property(stages GLOBAL PROPERTY COURSE_STAGES)
  foreach(number IN LISTS stages)
    set(stage stage${number})
    # What a kernel asks of memory is recorded by a program of tests/, which runs kernels on the executor.
    if(TARGET ${stage}_on_host AND COURSE_TESTS AND number EQUAL 7 AND NOT COURSE_SANITIZE AND NOT STAGE${number}_DIR)
      list(APPEND depends kernel_count)
      list(APPEND programs ${stage}=$<TARGET_FILE:kernel_count>)
    endif()
    if(NOT DEFINED course_scene_${stage} OR STAGE${number}_DIR)
      continue()
    endif()
    list(APPEND depends ${stage})
    list(APPEND programs ${stage}=$<TARGET_FILE:${stage}>)
    if(COURSE_EMCXX)
      course_compile_scene(${stage} ${folder}/${stage}_wasm.js)
      list(APPEND files ${folder}/${stage}_wasm.js)
      list(APPEND compiled ${stage})
    endif()
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${widgets}/*.js ${widgets}/*.css ${widgets}/*.py
       ${PROJECT_SOURCE_DIR}/common/serving/page/*)
  list(JOIN compiled "," compiled)
  add_custom_command(OUTPUT ${folder}/widgets.js
    COMMAND Python3::Interpreter ${widgets}/bundle.py ${folder} --compiled=${compiled} ${programs}
    DEPENDS ${sources} ${depends}
    COMMENT "Recording the scenes of the site's widgets" VERBATIM)
  add_custom_target(site_widgets DEPENDS ${folder}/widgets.js ${files})
  set_target_properties(site_widgets PROPERTIES SCENE_PROGRAMS "${programs}")
endfunction()

# One stage's scenes, to WebAssembly inside one .js.
function(course_compile_scene stage output)
  set(objects ${PROJECT_BINARY_DIR}/wasm)
  # Only the system headers that Emscripten lacks: the machine's libc must not be found.
  set(include ${objects}/include)
  file(MAKE_DIRECTORY ${include})
  find_path(COURSE_JSON_INCLUDE_DIR nlohmann/json.hpp)
  mark_as_advanced(COURSE_JSON_INCLUDE_DIR)
  get_target_property(json nlohmann_json::nlohmann_json INTERFACE_INCLUDE_DIRECTORIES)
  list(GET json 0 json)
  foreach(candidate IN ITEMS ${COURSE_JSON_INCLUDE_DIR} ${json})
    if(EXISTS ${candidate}/nlohmann/json.hpp)
      file(CREATE_LINK ${candidate}/nlohmann ${include}/nlohmann SYMBOLIC)
    endif()
  endforeach()
  get_target_property(xxhash course_xxhash INTERFACE_INCLUDE_DIRECTORIES)
  file(CREATE_LINK ${xxhash}/xxhash.h ${include}/xxhash.h SYMBOLIC)
  get_target_property(eigen Eigen3::Eigen INTERFACE_INCLUDE_DIRECTORIES)

  set(directory ${PROJECT_BINARY_DIR}/stages/${stage})
  set(sources ${PROJECT_SOURCE_DIR}/common/site/widgets/scene_shim.cpp ${directory}/demo/scene.cpp)
  foreach(name IN LISTS course_scene_${stage})
    list(APPEND sources ${directory}/${name}.cpp)
  endforeach()
  foreach(name IN LISTS course_scene_common course_scene_common_${stage})
    list(APPEND sources ${PROJECT_SOURCE_DIR}/common/${name}.cpp)
  endforeach()
  # -fwasm-exceptions: bad commands throw. Small first: nothing here has to be fast.
  set(options -std=c++20 -Os -fwasm-exceptions -DNDEBUG)
  # em++ minifies with modules of Debian's that another Node.js does not look for there.
  set(compiler ${CMAKE_COMMAND} -E env NODE_PATH=/usr/share/nodejs:$ENV{NODE_PATH} ${COURSE_EMCXX})
  set(compiled "")
  foreach(source IN LISTS sources)
    get_filename_component(name ${source} NAME_WE)
    # The stage's files, and the common ones once for all stages.
    cmake_path(RELATIVE_PATH source BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE relative)
    if(relative MATCHES "^common/(app|base|math|model)/")
      set(object ${objects}/common/${name}.o)
    else()
      set(object ${objects}/${stage}/${name}.o)
    endif()
    list(APPEND compiled ${object})
    get_property(known GLOBAL PROPERTY course_wasm_objects)
    if(NOT object IN_LIST known)
      set_property(GLOBAL APPEND PROPERTY course_wasm_objects ${object})
      get_filename_component(parent ${object} DIRECTORY)
      file(MAKE_DIRECTORY ${parent})
      add_custom_command(OUTPUT ${object}
        COMMAND ${compiler} ${options} -DSTAGE=${stage} -include ${widgets}/bit_cast.h -I${PROJECT_SOURCE_DIR} -I${directory} -isystem ${include}
                -isystem ${eigen} -MMD -MF ${object}.d -c ${source} -o ${object}
        DEPENDS ${source} DEPFILE ${object}.d COMMENT "Compiling ${stage}'s ${name} to WebAssembly" VERBATIM)
    endif()
  endforeach()
  get_filename_component(parent ${output} DIRECTORY)
  file(MAKE_DIRECTORY ${parent})
  add_custom_command(OUTPUT ${output}
    COMMAND ${compiler} ${options} ${compiled} -o ${output} -sSINGLE_FILE=1 -sMODULARIZE=1 -sEXPORT_NAME=course_${stage}
            -sENVIRONMENT=web,node -sEXPORTED_RUNTIME_METHODS=ccall -sALLOW_MEMORY_GROWTH=1 --no-entry
    DEPENDS ${compiled} COMMENT "Linking ${stage}'s scenes to WebAssembly" VERBATIM)
endfunction()
