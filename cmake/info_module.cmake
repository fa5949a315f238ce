# _info: the pybind11 module without tensors. It needs pybind11 and this Python's headers; where either
# is missing the package works without the module.
find_python_package(pybind11 pybind11_folder)
if(NOT pybind11_folder OR NOT Python_Development.Module_FOUND)
  message(STATUS "No sparse_attn._info: pybind11 or Python's headers are missing")
  return()
endif()
set(PYBIND11_FINDPYTHON ON)
set(pybind11_DIR ${pybind11_folder}/share/cmake/pybind11)
find_package(pybind11 REQUIRED CONFIG)

pybind11_add_module(_info MODULE NO_EXTRAS ${INFO_SOURCES})
target_include_directories(_info PRIVATE csrc)
target_compile_options(_info PRIVATE -Os)  # half the time of -O3; no call computes anything
string(REPLACE ";" " " isas "${SPARSE_ATTN_ISAS}")
set(cuda_version)
set(cuda_archs)
if(SPARSE_ATTN_HAS_CUDA)
  set(cuda_version ${CMAKE_CUDA_COMPILER_VERSION})
  string(REPLACE ";" " " cuda_archs "${CUDA_ARCHS};90a-real")
endif()
target_compile_definitions(_info PRIVATE
  SPARSE_ATTN_VERSION="${PROJECT_VERSION}"
  SPARSE_ATTN_COMPILER="${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}"
  SPARSE_ATTN_ISAS="${isas}"
  SPARSE_ATTN_CUDA_VERSION="${cuda_version}"
  SPARSE_ATTN_CUDA_ARCHS="${cuda_archs}")
set_target_properties(_info PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${SPARSE_ATTN_OUTPUT_DIR})
