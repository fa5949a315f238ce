# choose_cuda_archs(): the architectures of all kernels but Hopper's own, which are sm_90a, as
# SPARSE_ATTN_CUDA_ARCHS says: a list as it stands, or
#   ALL   code for every GPU from compute capability 7.5 to 8.9, for libraries that run elsewhere
#   AUTO  code for those of them that this machine has
# GPUs without code of their own take PTX, which their driver compiles at the first call and keeps:
# that of 8.0, and below it that of 7.5. Code of 8.0 runs on 8.6 and 8.9 too.
set(ALL_CUDA_ARCHS 75-real 80-real 80-virtual)
set(SPARSE_ATTN_CUDA_ARCHS AUTO CACHE STRING
    "Code for compute capability 7.5 to 8.9: AUTO (this machine's), ALL, or as 80-real;80-virtual")

# Sets `out` to those of this machine's GPUs, and PTX for all others.
function(find_cuda_archs out)
  set(found)
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(nvidia_smi)
    execute_process(
      COMMAND ${nvidia_smi} --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found ERROR_QUIET TIMEOUT 60)
  endif()
  set(archs 75-virtual)
  if("\n${found}\n" MATCHES "\n7\\.5\n")
    set(archs 75-real)
  endif()
  if("\n${found}\n" MATCHES "\n8\\.[0-9]\n")
    list(APPEND archs 80-real)
  endif()
  set(${out} ${archs} 80-virtual PARENT_SCOPE)
endfunction()

# Sets CUDA_ARCHS; CUDA_DENSE_ARCHS, those of kernels that GPUs below 8.0 have no room for; and
# both with code for dependent launches and clusters: CUDA_DEPENDENT_ARCHS, CUDA_DECODE_ARCHS.
macro(choose_cuda_archs)
  set(CUDA_ARCHS ${SPARSE_ATTN_CUDA_ARCHS})
  if(CUDA_ARCHS STREQUAL "ALL")
    set(CUDA_ARCHS ${ALL_CUDA_ARCHS})
  elseif(CUDA_ARCHS STREQUAL "AUTO")
    find_cuda_archs(CUDA_ARCHS)
  endif()
  foreach(arch IN LISTS CUDA_ARCHS)
    if(NOT arch MATCHES "^[0-9]+[af]?(-real|-virtual)?$")
      message(FATAL_ERROR
              "SPARSE_ATTN_CUDA_ARCHS: expected AUTO, ALL or a list as 80-real;80-virtual, got ${arch}")
    endif()
  endforeach()
  message(STATUS "CUDA architectures: ${CUDA_ARCHS}, and 90a-real for Hopper")
  set(CUDA_DENSE_ARCHS ${CUDA_ARCHS})
  list(FILTER CUDA_DENSE_ARCHS EXCLUDE REGEX "^[1-7][0-9](-|$)")
  if(NOT CUDA_DENSE_ARCHS)
    set(CUDA_DENSE_ARCHS 80-virtual)  # never chosen on the devices that the build is for
  endif()
  set(CUDA_DEPENDENT_ARCHS ${CUDA_ARCHS} 90-real)
  set(CUDA_DECODE_ARCHS ${CUDA_DENSE_ARCHS} 90-real)
  list(REMOVE_DUPLICATES CUDA_DEPENDENT_ARCHS)
  list(REMOVE_DUPLICATES CUDA_DECODE_ARCHS)
endmacro()
