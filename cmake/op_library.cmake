# add_op_library(<name>): a shared library of ops, written as <output>/<name>.so. It holds no Python;
# what it takes from torch is the stable ABI.
function(add_op_library name)
  add_library(${name} MODULE)
  set_target_properties(${name} PROPERTIES
    PREFIX "" SUFFIX .so DEFINE_SYMBOL "" LIBRARY_OUTPUT_DIRECTORY ${SPARSE_ATTN_OUTPUT_DIR})
  target_include_directories(${name} PRIVATE csrc)
  target_link_libraries(${name} PRIVATE torch_stable)
  target_link_options(${name} PRIVATE -Wl,--exclude-libs,ALL)
endfunction()
