# The imported target llama_cpp::llama: headers and libraries of the installed llama-cpp-python.
#
# The package is located without importing it, since its import loads the libraries.

set(LLAMA_CPP_PYTHON_VERSION 0.3.36)

set(locate_llama_cpp
    [=[
import importlib.metadata as metadata
import importlib.util
import pathlib

spec = importlib.util.find_spec("llama_cpp")
if spec is None or not spec.submodule_search_locations:
    raise SystemExit("not installed")
package = pathlib.Path(list(spec.submodule_search_locations)[0])
distribution = metadata.distribution("llama_cpp_python")
places = [package / "include", package.parent / "include", distribution.locate_file("include")]
include = next((p for p in map(pathlib.Path, places) if (p / "llama.h").is_file()), "")
print(distribution.version, pathlib.Path(include).as_posix() if include else "",
      (package / "lib").as_posix(), sep=";")
]=])
execute_process(
  COMMAND ${Python_EXECUTABLE} -c "${locate_llama_cpp}"
  OUTPUT_VARIABLE llama_cpp_found
  ERROR_VARIABLE llama_cpp_error
  RESULT_VARIABLE llama_cpp_result
  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_STRIP_TRAILING_WHITESPACE)

set(llama_cpp_advice
    "Install it with: CMAKE_ARGS=-DGGML_NATIVE=OFF pip install llama-cpp-python==${LLAMA_CPP_PYTHON_VERSION}"
)
if(NOT llama_cpp_result EQUAL 0)
  message(FATAL_ERROR "llama-cpp-python ${LLAMA_CPP_PYTHON_VERSION} is needed by "
                      "${Python_EXECUTABLE}: ${llama_cpp_error}\n${llama_cpp_advice}")
endif()
list(GET llama_cpp_found 0 llama_cpp_version)
list(GET llama_cpp_found 1 llama_cpp_include)
list(GET llama_cpp_found 2 llama_cpp_lib)
if(NOT llama_cpp_version VERSION_EQUAL LLAMA_CPP_PYTHON_VERSION)
  message(FATAL_ERROR "llama-cpp-python ${llama_cpp_version} is installed, but "
                      "${LLAMA_CPP_PYTHON_VERSION} is needed: its C++ symbols change from version "
                      "to version.\n${llama_cpp_advice}")
endif()
if(NOT llama_cpp_include)
  message(FATAL_ERROR "llama-cpp-python ${llama_cpp_version} is installed without llama.h: "
                      "a full build of it installs the headers too.\n${llama_cpp_advice}")
endif()

# A second, unused copy of the libraries lies beside the package; only this folder will do.
foreach(name IN ITEMS llama ggml ggml-base)
  find_library(llama_cpp_library_${name} NAMES ${name} PATHS ${llama_cpp_lib} NO_DEFAULT_PATH
                                                             NO_CACHE)
  if(NOT llama_cpp_library_${name})
    message(FATAL_ERROR "no library ${name} in ${llama_cpp_lib}: this llama-cpp-python was built "
                        "without shared libraries.\n${llama_cpp_advice}")
  endif()
  add_library(llama_cpp::${name} UNKNOWN IMPORTED)
  set_target_properties(
    llama_cpp::${name} PROPERTIES IMPORTED_LOCATION ${llama_cpp_library_${name}}
                                  INTERFACE_INCLUDE_DIRECTORIES ${llama_cpp_include})
endforeach()
target_link_libraries(llama_cpp::llama INTERFACE llama_cpp::ggml llama_cpp::ggml-base)
message(STATUS "llama-cpp-python ${llama_cpp_version}: ${llama_cpp_lib}")
