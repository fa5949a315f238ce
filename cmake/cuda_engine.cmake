# add_cuda_engine(<name> [LOCAL_MEMORY <bytes>] ARCHS ... SOURCES ... [FLAGS ...]
#                 [GENERATOR <script> GENERATED <header>]):
# an engine's kernels, or a part of them, as objects of _C_cuda, compiled for their own architectures.
# nvcc runs under nvcc_checked.py, which logs ptxas and fails the build on its serialisation notes
# and on kernels that use more local memory than LOCAL_MEMORY allows.
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_FLAGS_RELEASE -O1)  # of host code, which checks and launches; kernels have -O3
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)

function(add_cuda_engine name)
  cmake_parse_arguments(ENGINE "" "LOCAL_MEMORY;GENERATOR;GENERATED" "ARCHS;SOURCES;FLAGS" ${ARGN})
  set(target cuda_${name})
  set(checked ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/cmake/nvcc_checked.py)
  if(DEFINED ENGINE_LOCAL_MEMORY AND NOT CMAKE_BUILD_TYPE STREQUAL "Debug")
    list(APPEND checked --local-memory=${ENGINE_LOCAL_MEMORY})
  endif()
  add_library(${target} OBJECT ${ENGINE_SOURCES})
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${ENGINE_ARCHS}"
    CUDA_COMPILER_LAUNCHER "${checked}")
  target_compile_options(${target} PRIVATE
    $<$<CONFIG:Debug>:-lineinfo> -Xptxas -v -Xcompiler -Wall,-Wextra ${ENGINE_FLAGS})
  target_include_directories(${target} PRIVATE csrc)
  target_link_libraries(_C_cuda PRIVATE ${target})

  if(ENGINE_GENERATOR)
    set(generated ${PROJECT_BINARY_DIR}/generated/${name})
    add_custom_command(
      OUTPUT ${generated}/${ENGINE_GENERATED}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${generated}
      COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/${ENGINE_GENERATOR}
              ${generated}/${ENGINE_GENERATED}
      DEPENDS ${ENGINE_GENERATOR}
      COMMENT "Writing ${ENGINE_GENERATED}")
    target_sources(${target} PRIVATE ${generated}/${ENGINE_GENERATED})
    target_include_directories(${target} PRIVATE ${generated})
  endif()
endfunction()
