// Tokenizes texts with a GGUF file's vocabulary, which need not have tensors, for comparison with another tokenizer.
//
//   galley-gguf-tokens FILE.gguf SEPARATOR <TEXTS
//
// TEXTS: texts between lines that read SEPARATOR. On standard output one line a text: its ids, separated by spaces;
// names of special tokens count as plain text, nothing is added.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <iterator>
#include <string>

#include "models/gguf.h"
#include "models/gguf_metadata.h"
#include "text/tokenizer.h"

namespace {

void run(const char* file, const std::string& separator) {
  const galley::models::GgufFile gguf(file);
  const auto tokens = gguf.strings("tokenizer.ggml.tokens");
  const auto assets = galley::models::gguf_assets(gguf, tokens ? static_cast<int>(tokens->size()) : 0);
  const auto tokenizer = galley::text::make_tokenizer(assets);
  const std::string all{std::istreambuf_iterator<char>(std::cin), {}};
  const std::string between = "\n" + separator + "\n";
  for (std::size_t at = 0; at <= all.size();) {
    const std::size_t end = std::min(all.find(between, at), all.size());
    for (const std::int32_t id : tokenizer->encode(all.substr(at, end - at), /*parse_special=*/false)) {
      std::cout << id << ' ';
    }
    std::cout << '\n';
    at = end + between.size();
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: galley-gguf-tokens FILE.gguf SEPARATOR <TEXTS\n";
    return EXIT_FAILURE;
  }
  try {
    run(argv[1], argv[2]);
    return EXIT_SUCCESS;
  } catch (const std::exception& error) {
    std::cerr << "galley-gguf-tokens: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
