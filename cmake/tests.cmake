# ---- Fuzz targets: under libFuzzer with clang (`make fuzz`), else over their corpus, as a test ----
option(LOWCOMM_FUZZ "fuzz targets with libFuzzer (needs clang)" OFF)
set(fuzz_targets frame decode text slot_file tcp strangers endpoint)
if(LOWCOMM_FUZZ)
  foreach(target ${fuzz_targets})
    add_executable(fuzz_${target} tests/fuzz/${target}.cpp)
    target_compile_options(fuzz_${target} PRIVATE -fsanitize=fuzzer)
    target_link_options(fuzz_${target} PRIVATE -fsanitize=fuzzer)
    target_link_libraries(fuzz_${target} PRIVATE lowcomm_core)
  endforeach()
  target_compile_options(lowcomm_core PRIVATE -fsanitize=fuzzer-no-link)
endif()
add_executable(fuzz_seeds EXCLUDE_FROM_ALL tests/fuzz/seeds.cpp)
target_link_libraries(fuzz_seeds PRIVATE lowcomm_core)

# ---- GoogleTest ----
if(LOWCOMM_BUILD_TESTS)
  set(LOWCOMM_GTEST "" CACHE PATH "GoogleTest's sources, where it is not installed")
  set(gtest_sources ${LOWCOMM_GTEST})
  if(NOT gtest_sources)
    find_package(GTest)
    if(NOT GTest_FOUND)
      set(gtest_sources /usr/src/googletest)  # Debian's; compiled for the target, where another is built for
    endif()
  endif()
  if(EXISTS "${gtest_sources}/CMakeLists.txt")
    set(BUILD_GMOCK OFF CACHE BOOL "" FORCE)
    add_subdirectory(${gtest_sources} ${CMAKE_BINARY_DIR}/googletest EXCLUDE_FROM_ALL)
  elseif(gtest_sources)
    message(FATAL_ERROR "The C++ tests need GoogleTest: expected the system package (Debian: libgtest-dev) or sources that "
      "-DLOWCOMM_GTEST names, got none in ${gtest_sources}.")
  endif()
  enable_testing()
  include(GoogleTest)
  # At -O1 the tests compile in half the time, and all of them still run in a minute.
  set(test_options -ffp-contract=off $<$<CONFIG:Release>:-O1>)  # what they expect is computed as the codecs compute
  set(core_folders base kernels codec wire transport collective messages engine pipeline)  # as in csrc; tests of the whole lie above them
  list(TRANSFORM core_folders REPLACE "(.+)" "${CMAKE_SOURCE_DIR}/tests/cpp/\\1/*_test.cpp")
  file(GLOB core_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cpp/*_test.cpp ${core_folders})
  add_executable(core_tests ${core_tests})
  target_include_directories(core_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp)
  target_compile_definitions(core_tests PRIVATE LOWCOMM_SOURCE_DIR="${CMAKE_SOURCE_DIR}" ${LOWCOMM_TLS_DEFINITION})
  target_compile_options(core_tests PRIVATE ${test_options})
  target_precompile_headers(core_tests PRIVATE <gtest/gtest.h> <functional> <mutex> <random> <thread>)
  target_link_libraries(core_tests PRIVATE lowcomm_core GTest::gtest GTest::gtest_main ${LOWCOMM_TLS_LIBRARY})
  gtest_discover_tests(core_tests PROPERTIES TIMEOUT 120)
  # Optimised, vectors wider than the machine's take minutes to compile. GCC notes an ABI of vectors that no function
  # here is called by.
  file(GLOB wide_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cpp/kernels/wide_*test.cpp)
  set_source_files_properties(${wide_tests} PROPERTIES
    COMPILE_OPTIONS "-O0;-Wno-psabi;${LOWCOMM_VECTOR_FLAGS}" SKIP_PRECOMPILE_HEADERS ON)

  # Those of them that call kernels, by themselves: what an emulator of another machine runs (make test-neon,
  # test-avx512). Built when asked for. Not those that bring loops of their own, alike on every machine, nor exchanges.
  foreach(test ${core_tests})
    file(STRINGS ${test} calls_kernels REGEX "\"(kernels/|grid_cases\\.h)")
    if(calls_kernels AND NOT test MATCHES "/wide_|/collective/|/messages/")
      list(APPEND kernel_tests ${test})
    endif()
  endforeach()
  add_executable(kernel_tests EXCLUDE_FROM_ALL ${kernel_tests})
  target_include_directories(kernel_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp)
  target_compile_definitions(kernel_tests PRIVATE LOWCOMM_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  target_compile_options(kernel_tests PRIVATE ${test_options})
  target_link_libraries(kernel_tests PRIVATE lowcomm_core GTest::gtest GTest::gtest_main)

  # That no decoder reads past its payload, only sanitizers see: the corpus is replayed under them wherever the compiler
  # has them, whatever else is built. Neither optimised nor with AVX-512's loops, for the sake of compile time.
  set(replayed_core lowcomm_core)
  include(CheckCXXSourceCompiles)
  set(CMAKE_REQUIRED_FLAGS "-fsanitize=address,undefined")
  check_cxx_source_compiles("int main() {}" LOWCOMM_HAS_SANITIZERS)
  unset(CMAKE_REQUIRED_FLAGS)
  if(LOWCOMM_HAS_SANITIZERS AND NOT LOWCOMM_SANITIZE)
    set(replayed_core lowcomm_sanitized)
    set(sanitized_sources ${LOWCOMM_CORE_SOURCES})
    list(FILTER sanitized_sources INCLUDE REGEX
      "/csrc/(base|kernels|codec|wire)/|/transport/tcp/|/(messages/announcement|collective/(context|message_summary|plan))\\.|/pipeline/slot_file_header\\.")
    list(FILTER sanitized_sources EXCLUDE REGEX "/codec/fused")
    add_library(lowcomm_sanitized STATIC ${sanitized_sources} ${avx2_units} ${neon_units})
    target_compile_definitions(lowcomm_sanitized PRIVATE ${avx2_definition} ${neon_definition} ${LOWCOMM_TLS_DEFINITION})
    target_link_libraries(lowcomm_sanitized PRIVATE ${LOWCOMM_TLS_LIBRARY} Threads::Threads)
    target_include_directories(lowcomm_sanitized PUBLIC ${CMAKE_SOURCE_DIR}/csrc)
    target_compile_options(lowcomm_sanitized PRIVATE -ffp-contract=off PUBLIC
      -O0 -fsanitize=address,undefined -fno-sanitize-recover=all -D_GLIBCXX_ASSERTIONS)
    target_link_options(lowcomm_sanitized PUBLIC -fsanitize=address,undefined)
  endif()
  foreach(target ${fuzz_targets})
    add_executable(replay_${target} tests/fuzz/${target}.cpp tests/fuzz/replay.cpp)
    target_link_libraries(replay_${target} PRIVATE ${replayed_core})
    add_test(NAME fuzz.${target} COMMAND replay_${target} ${CMAKE_SOURCE_DIR}/tests/fuzz/corpus/${target})
  endforeach()

  # The program whose instructions instructions_test.cpp counts.
  add_executable(counted tests/cpp/instructions/subject.cpp)
  target_link_libraries(counted PRIVATE lowcomm_core)
  add_dependencies(core_tests counted)
  if(LOWCOMM_SANITIZE OR NOT CMAKE_BUILD_TYPE STREQUAL "Release" OR NOT CMAKE_CXX_FLAGS_RELEASE MATCHES "-O[23]")
    set(unoptimised 1)
  else()
    set(unoptimised 0)
  endif()
  target_compile_definitions(counted PRIVATE LOWCOMM_COUNTED_ELEMENTS=65536)
  set_source_files_properties(tests/cpp/instructions_test.cpp PROPERTIES COMPILE_DEFINITIONS
    "LOWCOMM_COUNTED_ELEMENTS=65536;LOWCOMM_COUNTED_BINARY=\"$<TARGET_FILE:counted>\";LOWCOMM_UNOPTIMISED=${unoptimised}")

  # The CUDA kernels twice: executed by the simulator of CUDA threads; on a device, where nvcc built them.
  file(GLOB cuda_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cpp/cuda/*_test.cpp)
  # The simulator has one thread and many fibers: nothing for ThreadSanitizer to find, and minutes a test.
  if(NOT LOWCOMM_SANITIZE MATCHES "thread")
    file(GLOB cuda_sim CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cpp/cuda/sim/*.cpp)
    add_executable(cuda_sim_tests ${cuda_tests} ${cuda_sim})
    target_include_directories(cuda_sim_tests BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp/cuda/sim)
    target_include_directories(cuda_sim_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp)
    target_compile_options(cuda_sim_tests PRIVATE -Wall -Wno-unknown-pragmas ${test_options})
    target_link_libraries(cuda_sim_tests PRIVATE lowcomm_core GTest::gtest GTest::gtest_main)
    gtest_discover_tests(cuda_sim_tests TEST_PREFIX "simulated." PROPERTIES TIMEOUT 300)
  endif()
  if(LOWCOMM_CUDA_KERNELS)
    add_executable(cuda_tests ${cuda_tests})
    target_include_directories(cuda_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp)
    target_include_directories(cuda_tests SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
    target_link_libraries(cuda_tests PRIVATE lowcomm_cuda GTest::gtest GTest::gtest_main)
    gtest_discover_tests(cuda_tests TEST_PREFIX "device." PROPERTIES TIMEOUT 300)
  endif()
  if(LOWCOMM_EXTENSION)
    file(GLOB torch_tests CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/cpp/tensor/*_test.cpp
      ${CMAKE_SOURCE_DIR}/tests/cpp/diloco/*_test.cpp ${CMAKE_SOURCE_DIR}/tests/cpp/adam/*_test.cpp
      ${CMAKE_SOURCE_DIR}/tests/cpp/seed_replay/*_test.cpp ${CMAKE_SOURCE_DIR}/tests/cpp/subspace/*_test.cpp
      ${CMAKE_SOURCE_DIR}/tests/cpp/backend/*_test.cpp)
    if(torch_tests)
      add_library(fake_device SHARED tests/cpp/fake_device.cpp tests/cpp/fake_device_ops.cpp tests/cpp/late_streams.cpp)  # a library, because Python tests load it too
      target_link_libraries(fake_device PRIVATE torch_host)
      set_target_properties(fake_device PROPERTIES CXX_VISIBILITY_PRESET default)
      add_executable(torch_tests ${torch_tests})
      target_include_directories(torch_tests PRIVATE ${CMAKE_SOURCE_DIR}/tests/cpp)
      target_link_libraries(torch_tests PRIVATE lowcomm_backend lowcomm_diloco lowcomm_adam lowcomm_seed_replay fake_device GTest::gtest GTest::gtest_main)
      # Position-independent as what is precompiled; GCC 12 sees an overflow in its own operator+ of strings.
      target_compile_options(torch_tests PRIVATE -fPIC $<$<CXX_COMPILER_ID:GNU>:-Wno-stringop-overflow>)
      target_precompile_headers(torch_tests REUSE_FROM lowcomm_tensor)
      # A process loads torch for a second, and a test takes a tenth of that: a share of the tests a process.
      set(shares 4)
      math(EXPR last_share "${shares} - 1")
      foreach(share RANGE ${last_share})
        add_test(NAME torch_tests.${share} COMMAND torch_tests --gtest_brief=1)
        set_tests_properties(torch_tests.${share} PROPERTIES TIMEOUT 300
          ENVIRONMENT "GTEST_TOTAL_SHARDS=${shares};GTEST_SHARD_INDEX=${share};OMP_NUM_THREADS=1")
      endforeach()
    endif()
    if(NOT LOWCOMM_CUDA_KERNELS)  # what calls them compiles in builds without them too
      file(GLOB layers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/tensor/*.cpp ${CMAKE_SOURCE_DIR}/csrc/seed_replay/*.cpp ${CMAKE_SOURCE_DIR}/csrc/backend/*.cpp)
      foreach(source ${layers})
        file(STRINGS ${source} calls_kernels REGEX "^#if LOWCOMM_CUDA_KERNELS")
        if(calls_kernels)
          list(APPEND cuda_callers ${source})
        endif()
      endforeach()
      add_library(cuda_callers OBJECT ${cuda_callers})
      target_compile_definitions(cuda_callers PRIVATE LOWCOMM_CUDA_KERNELS=1)
      target_compile_options(cuda_callers PRIVATE -Wall -ffp-contract=off)
      target_link_libraries(cuda_callers PRIVATE lowcomm_tensor)
      target_precompile_headers(cuda_callers REUSE_FROM lowcomm_tensor)
    endif()
  endif()
endif()
