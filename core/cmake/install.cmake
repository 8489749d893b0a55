# What is installed, and where. Three users: `cmake --install` (a prefix with lib/, include/), the Python wheel (the same
# inside phalanx/core/, without symlinks, because wheels have none), and add_subdirectory (nothing by default).
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(phx_install_default OFF)
if(PROJECT_IS_TOP_LEVEL OR CMAKE_PROJECT_NAME STREQUAL "phalanx")
  set(phx_install_default ON)
endif()
option(PHX_INSTALL "Make rules that install the library, its headers and its CMake package" ${phx_install_default})
if(NOT PHX_INSTALL)
  return()
endif()

if(DEFINED SKBUILD)
  set(phx_lib_dir lib)
  set(phx_include_dir include)
  set(phx_cmake_dir cmake)
  # One real file, libphalanx.so.0. There is no libphalanx.so, so -lphalanx would find nothing: name the file.
  set_target_properties(phalanx PROPERTIES VERSION 0 SOVERSION 0)
  set(phx_namelink NAMELINK_SKIP)
  set(phx_pc_library "-l:libphalanx.so.0")
else()
  set(phx_lib_dir ${CMAKE_INSTALL_LIBDIR})
  set(phx_include_dir ${CMAKE_INSTALL_INCLUDEDIR})
  set(phx_cmake_dir ${CMAKE_INSTALL_LIBDIR}/cmake/phalanx)
  set(phx_namelink "")
  set(phx_pc_library "-lphalanx")
endif()

# The library and its headers.
install(TARGETS phalanx EXPORT phalanxTargets
  LIBRARY DESTINATION ${phx_lib_dir} ${phx_namelink}
  INCLUDES DESTINATION ${phx_include_dir})
install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/include/phalanx DESTINATION ${phx_include_dir} FILES_MATCHING PATTERN "*.h*")
if(TARGET phalanx_torch)
  set_target_properties(phalanx_torch PROPERTIES INSTALL_RPATH "$ORIGIN")
  install(TARGETS phalanx_torch LIBRARY DESTINATION ${phx_lib_dir} NAMELINK_SKIP)
  install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/torch/phalanx_torch.h DESTINATION ${phx_include_dir}/phalanx)
endif()

# find_package(phalanx): target phalanx::phalanx.
install(EXPORT phalanxTargets NAMESPACE phalanx:: DESTINATION ${phx_cmake_dir})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/phalanxConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/phalanxConfig.cmake INSTALL_DESTINATION ${phx_cmake_dir}
  NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break what the one before it promised.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/phalanxConfigVersion.cmake
  VERSION ${PHX_VERSION} COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/phalanxConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/phalanxConfigVersion.cmake
  DESTINATION ${phx_cmake_dir})

# pkg-config phalanx: the paths are relative to the .pc file, so that the directory can be moved.
file(RELATIVE_PATH phx_pc_prefix /prefix/${phx_lib_dir}/pkgconfig /prefix)
configure_file(${CMAKE_CURRENT_LIST_DIR}/phalanx.pc.in ${CMAKE_CURRENT_BINARY_DIR}/phalanx.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/phalanx.pc DESTINATION ${phx_lib_dir}/pkgconfig)

# phalanx.core._abi and _abi_torch: what cffi needs to know of the headers, worked out now instead of at every import.
if(DEFINED SKBUILD)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
  set(phx_header ${CMAKE_CURRENT_SOURCE_DIR}/include/phalanx/phalanx.h)
  set(phx_headers ${phx_header})
  foreach(name cuda tuning random carrier)
    list(APPEND phx_headers ${CMAKE_CURRENT_SOURCE_DIR}/include/phalanx/${name}.h)
  endforeach()
  set(phx_torch_header ${CMAKE_CURRENT_SOURCE_DIR}/torch/phalanx_torch.h)
  set(phx_generate Python::Interpreter ${CMAKE_CURRENT_LIST_DIR}/generate_abi.py --output)
  set(phx_abi_modules ${CMAKE_CURRENT_BINARY_DIR}/_abi.py)
  add_custom_command(OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_abi.py
    COMMAND ${phx_generate} ${CMAKE_CURRENT_BINARY_DIR}/_abi.py ${phx_headers}
    DEPENDS ${CMAKE_CURRENT_LIST_DIR}/generate_abi.py ${phx_headers}
    VERBATIM)
  if(TARGET phalanx_torch AND EXISTS ${phx_torch_header})
    list(APPEND phx_abi_modules ${CMAKE_CURRENT_BINARY_DIR}/_abi_torch.py)
    add_custom_command(OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_abi_torch.py
      COMMAND ${phx_generate} ${CMAKE_CURRENT_BINARY_DIR}/_abi_torch.py --base ${phx_header} ${phx_torch_header}
      DEPENDS ${CMAKE_CURRENT_LIST_DIR}/generate_abi.py ${phx_header} ${phx_torch_header}
      VERBATIM)
  endif()
  add_custom_target(phx_abi_module ALL DEPENDS ${phx_abi_modules})
  install(FILES ${phx_abi_modules} DESTINATION .)
endif()
