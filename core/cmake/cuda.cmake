# The kernels for NVIDIA GPUs: compiled by nvcc into one file for all of them, which src/gpu/image.cpp takes into the library.
set(PHX_CUDA_IMAGE "" CACHE FILEPATH "Such a file, if it is there already: then nvcc is not needed")
if(PHX_CUDA_IMAGE)
  set(phx_cuda_image ${PHX_CUDA_IMAGE})
else()
  find_program(PHX_NVCC nvcc REQUIRED)
  set(phx_cuda_image ${CMAKE_CURRENT_BINARY_DIR}/collectives.fatbin)
  set(phx_cuda_flags -std=c++17 -O3 --fmad=false)
  foreach(arch ${PHX_CUDA_ARCHITECTURES})
    list(APPEND phx_cuda_flags -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
  list(GET PHX_CUDA_ARCHITECTURES -1 arch)
  list(APPEND phx_cuda_flags -gencode arch=compute_${arch},code=compute_${arch})

  add_custom_command(OUTPUT ${phx_cuda_image}
    COMMAND ${PHX_NVCC} ${phx_cuda_flags} -I${CMAKE_CURRENT_SOURCE_DIR}/include -I${CMAKE_CURRENT_SOURCE_DIR}/src -fatbin
            -MD -MF ${phx_cuda_image}.d -MT ${phx_cuda_image} ${CMAKE_CURRENT_SOURCE_DIR}/cuda/collectives.cu -o ${phx_cuda_image}
    MAIN_DEPENDENCY ${CMAKE_CURRENT_SOURCE_DIR}/cuda/collectives.cu
    DEPFILE ${phx_cuda_image}.d
    COMMENT "Compiling the kernels for NVIDIA GPUs" VERBATIM)
endif()
add_custom_target(phx_cuda_kernels DEPENDS ${phx_cuda_image})

set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/src/gpu/image.cpp PROPERTIES
  COMPILE_DEFINITIONS PHX_CUDA_KERNELS="${phx_cuda_image}" OBJECT_DEPENDS ${phx_cuda_image})
target_compile_definitions(phx_objects PRIVATE PHX_CUDA)
