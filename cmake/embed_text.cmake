# Writes the texts of `sources` as one array of characters to the C++ file `output`.
set(bytes "")
foreach(source IN LISTS sources)
  file(READ ${source} hex HEX)
  string(APPEND bytes "${hex}")
endforeach()
string(LENGTH "${bytes}" n)
math(EXPR n "${n} / 2")
string(REGEX REPLACE "(................................)" "\\1\n" bytes "${bytes}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
file(WRITE ${output} "#include \"few_rows_text.h\"\n\nnamespace dflash {\n"
                     "const char few_rows_text[] = {\n${bytes}0};\n"
                     "const size_t few_rows_text_size = ${n};\n}  // namespace dflash\n")
