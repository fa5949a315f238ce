# The kernels of the Hopper engine that SPARSE_ATTN_HEAD_DIMS asks for, of those in the engine's
# table: for each head dim writes a source file for each part (hopper/part.cuh) and one for top-k,
# and tells the compilers which head dims they are; sets HOPPER_KERNEL_SOURCES, and of those
# HOPPER_TOPK_SOURCES.
set(SPARSE_ATTN_HEAD_DIMS ALL CACHE STRING
    "Head dims that Hopper's kernels are compiled for, as 64;128: a call takes the next one; or ALL")
set(hopper_table csrc/cuda/hopper/table.h)
set(hopper_generated ${PROJECT_BINARY_DIR}/generated/hopper)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${hopper_table})

file(STRINGS ${hopper_table} head_dims REGEX "kHeadDims\\[\\] = {[0-9, ]+}")
string(REGEX REPLACE ".*{([0-9, ]+)}.*" "\\1" head_dims "${head_dims}")
string(REGEX MATCHALL "[0-9]+" all_head_dims "${head_dims}")
# Sets `out` to the keys by head dim of the kernel with these features.
function(read_keys features out)
  file(STRINGS ${hopper_table} kernel REGEX "{[0-9], ${features}, ")
  string(REGEX REPLACE ".*{([0-9, ]+)}}.*" "\\1" keys "${kernel}")
  string(REGEX MATCHALL "[0-9]+" keys "${keys}")
  set(${out} ${keys} PARENT_SCOPE)
endfunction()
# Adds a file of the kernels of a part.
function(write_part part head_dim file dtypes)
  set(kernels)
  foreach(dtype IN LISTS dtypes)
    list(APPEND kernels "template Status launch_part<Part::${part}, Dtype::${dtype}, ${head_dim}>\
(int32_t, const Arguments&)\;")
  endforeach()
  list(JOIN kernels "\n" kernels)
  configure_file(csrc/cuda/hopper/part.cu.in ${hopper_generated}/${file}_${head_dim}.cu @ONLY)
  list(APPEND HOPPER_KERNEL_SOURCES ${hopper_generated}/${file}_${head_dim}.cu)
  set(HOPPER_KERNEL_SOURCES ${HOPPER_KERNEL_SOURCES} PARENT_SCOPE)
endfunction()
read_keys(kTopCalls topk_keys)
read_keys(kSinkCalls sink_keys)
read_keys(kBiasedCalls biased_keys)  # those for lists have the same head dims or fewer
read_keys(kScoredRaggedCalls ragged_keys)  # like these
read_keys(kPlainRaggedCalls plain_ragged_keys)
set(HOPPER_KERNEL_SOURCES)
set(HOPPER_TOPK_SOURCES)
set(head_dim_bits 0)
foreach(head_dim topk sink biased ragged plain_ragged
        IN ZIP_LISTS all_head_dims topk_keys sink_keys biased_keys ragged_keys plain_ragged_keys)
  if(NOT SPARSE_ATTN_HEAD_DIMS STREQUAL ALL AND NOT head_dim IN_LIST SPARSE_ATTN_HEAD_DIMS)
    continue()
  endif()
  math(EXPR head_dim_bits "${head_dim_bits} | 1 << (${head_dim} / 16)")
  # The head dims that have most kernels take a file for each dtype: a file should take a minute.
  if(sink GREATER 0)
    write_part(kWhole ${head_dim} kWhole_kFloat16 kFloat16)
    write_part(kWhole ${head_dim} kWhole_kBFloat16 kBFloat16)
  else()
    write_part(kWhole ${head_dim} kWhole "kFloat16;kBFloat16")
  endif()
  if(biased GREATER 0)
    write_part(kBiased ${head_dim} kBiased "kFloat16;kBFloat16")
  endif()
  if(ragged GREATER 0 OR plain_ragged GREATER 0)
    write_part(kRagged ${head_dim} kRagged "kFloat16;kBFloat16")
  endif()
  if(topk GREATER 0)
    configure_file(
      csrc/cuda/hopper/topk_head_dim.cu.in ${hopper_generated}/topk_head_dim_${head_dim}.cu @ONLY)
    list(APPEND HOPPER_TOPK_SOURCES ${hopper_generated}/topk_head_dim_${head_dim}.cu)
  endif()
endforeach()
list(APPEND HOPPER_KERNEL_SOURCES ${HOPPER_TOPK_SOURCES})

if(NOT SPARSE_ATTN_HEAD_DIMS STREQUAL ALL)
  foreach(head_dim IN LISTS SPARSE_ATTN_HEAD_DIMS)
    if(NOT head_dim IN_LIST all_head_dims)
      list(JOIN all_head_dims ", " known)
      message(FATAL_ERROR "SPARSE_ATTN_HEAD_DIMS: expected some of ${known}, got ${head_dim}")
    endif()
  endforeach()
  if(NOT head_dim_bits)
    message(FATAL_ERROR "SPARSE_ATTN_HEAD_DIMS: expected ALL or some head dims, got none")
  endif()
  add_compile_definitions(SPARSE_ATTN_HEAD_DIM_BITS=${head_dim_bits}u)
endif()
