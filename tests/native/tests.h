#pragma once

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "check.h"
#include "shipped_pair.h"

std::vector<check::test> bf16_weights_tests(const shipped_pair & pair);
std::vector<check::test> top_k_tests();
std::vector<check::test> mask_tests();
std::vector<check::test> output_tests();
std::vector<check::test> search_tests();
std::vector<check::test> copy_tests();
std::vector<check::test> target_tests(const shipped_pair & pair);
std::vector<check::test> store_tests(const shipped_pair & pair);
std::vector<check::test> draft_tests(const shipped_pair & pair);
std::vector<check::test> window_tests(const shipped_pair & pair);
std::vector<check::test> saved_rows_tests(const shipped_pair & pair);
std::vector<check::test> file_tests(const shipped_pair & pair);
std::vector<check::test> head_tests(const shipped_pair & pair);

// A name in the temporary folder, and the file of that name while this lives.
class temporary_file {
  public:
    temporary_file();
    ~temporary_file();
    temporary_file(const temporary_file &) = delete;
    temporary_file & operator=(const temporary_file &) = delete;

    const std::string & path() const { return path_; }

  private:
    std::string path_;
};
