# The Python that runs the build, and from it torch's headers and libraries. Torch is looked up, not
# imported: target `torch_stable` carries what a user of the stable ABI needs and nothing else.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)

function(find_python_package name result)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import importlib.util as u; s = u.find_spec('${name}'); \
print(s.submodule_search_locations[0] if s else '', end='')"
    OUTPUT_VARIABLE folder COMMAND_ERROR_IS_FATAL ANY)
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

set(SPARSE_ATTN_TORCH "" CACHE PATH "torch's package folder; empty asks Python")
set(torch_folder "${SPARSE_ATTN_TORCH}")
if(NOT torch_folder)
  find_python_package(torch torch_folder)
endif()
if(NOT torch_folder)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no torch: install torch >= 2.10 first")
endif()
message(STATUS "torch: ${torch_folder}")

add_library(torch_stable INTERFACE)
target_include_directories(torch_stable SYSTEM INTERFACE ${torch_folder}/include)
target_compile_definitions(torch_stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)
target_link_directories(torch_stable INTERFACE ${torch_folder}/lib)
target_link_options(torch_stable INTERFACE -Wl,--no-as-needed)
target_link_libraries(torch_stable INTERFACE -ltorch -ltorch_cpu -lc10)
