// --kv-quant and kv_config.json: which layer is stored how, and errors that name file, entry and layer.
#include <gtest/gtest.h>

#include "checkpoint_files.h"
#include "memory_checkpoint.h"
#include "models/kv_quant.h"
#include "ops/error.h"

namespace galley::models {
namespace {

using ops::KvFormat;

testing::MemoryCheckpoint four_layers(const std::filesystem::path& place = "memory") {
  Config config = testing::MemoryCheckpoint::tiny_llama();
  config.layers = 4;
  testing::MemoryCheckpoint checkpoint(config);
  checkpoint.place = place;
  return checkpoint;
}

std::vector<ops::AttentionSpec> layers(const std::vector<int>& dims) {
  std::vector<ops::AttentionSpec> specs(dims.size());
  for (std::size_t i = 0; i < dims.size(); ++i) specs[i].head_dim = dims[i];
  return specs;
}

template <class F>
std::string refusal(const F& f) {
  try {
    static_cast<void>(f());
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const std::string& word : words) EXPECT_NE(text.find(word), std::string::npos) << text << " lacks " << word;
}

TEST(KvQuantChoice, OneWidthForAllInTheWidestGroupsThatFit) {
  const auto checkpoint = four_layers();
  const auto formats = KvQuant::choose("4", checkpoint, 16).formats(layers({64, 128, 96, 256}));
  EXPECT_EQ(formats, (std::vector<KvFormat>{{4, 64}, {4, 64}, {4, 32}, {4, 64}}));
  EXPECT_EQ(KvQuant::choose("8", checkpoint, 1).formats(layers({32})), (std::vector<KvFormat>{{8, 32}}));
  EXPECT_TRUE(KvQuant::choose("off", checkpoint, 1).off());
  EXPECT_EQ(KvQuant().formats(layers({80})), (std::vector<KvFormat>{KvFormat{}}));
  expect_words(refusal([&] {
                 return KvQuant::choose("8", checkpoint, 1).formats(layers({64, 80}));
               }),
               {"--kv-quant 8", "layer 1", "80", "off"});
  expect_words(refusal([&] { return KvQuant::choose("5", checkpoint, 1); }), {"--kv-quant 5", "off, 8, 4 or config"});
}

TEST(KvQuantChoice, TheModelsOwnFile) {
  const test::TempFolder folder;
  const auto checkpoint = four_layers(folder.path());
  EXPECT_TRUE(KvQuant::choose("", checkpoint, 1).off()) << "no file, nothing asked";
  expect_words(refusal([&] { return KvQuant::choose("config", checkpoint, 1); }),
               {folder.path().string(), "kv_config.json", "off, 8 or 4"});
  folder.write("kv_config.json", R"([{"layer_idx": 3, "bits": 8}, {"layer_idx": 0, "bits": 4, "group_size": 32}])");
  const std::vector<KvFormat> expected{{4, 32}, KvFormat{}, KvFormat{}, {8, 64}};
  const auto dims = layers({64, 64, 64, 64});
  EXPECT_EQ(KvQuant::choose("", checkpoint, 1).formats(dims), expected);
  EXPECT_EQ(KvQuant::choose("config", checkpoint, 16).formats(dims), expected);
  EXPECT_TRUE(KvQuant::choose("", checkpoint, 2).off()) << "batches are plain unless asked";
  EXPECT_TRUE(KvQuant::choose("off", checkpoint, 1).off());
  EXPECT_EQ(describe(expected, "plain"), "plain in 2 layers, 4-bit in 1 layer, 8-bit in 1 layer");
  EXPECT_EQ(describe(KvQuant().formats(dims), "f16"), "f16");
  expect_words(refusal([&] {
                 return KvQuant::choose("config", checkpoint, 1).formats(layers({64, 64, 64, 96}));
               }),
               {"kv_config.json", "layer 3", "96", "group_size"});
}

TEST(KvQuantChoice, BadFilesAreRefusedByEntryAndLayer) {
  const test::TempFolder folder;
  const auto checkpoint = four_layers(folder.path());
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"{", {"expected a list"}},
      {"{}", {"expected a list"}},
      {"[]", {"expected a list"}},
      {"[7]", {"entry 0", "expected an object"}},
      {R"([{"bits": 4}])", {"entry 0", "layer_idx", "missing"}},
      {R"([{"layer_idx": 1}])", {"entry 0", "bits", "missing"}},
      {R"([{"layer_idx": 1, "bits": 4}, {"layer_idx": 4, "bits": 4}])", {"entry 1", "layer_idx", "0 to 3", "found 4"}},
      {R"([{"layer_idx": -1, "bits": 4}])", {"entry 0", "layer_idx", "found -1"}},
      {R"([{"layer_idx": 2, "bits": 5}])", {"layer 2", "4 or 8 bits", "found 5"}},
      {R"([{"layer_idx": 2, "bits": "4"}])", {"entry 0", "bits", "an integer"}},
      {R"([{"layer_idx": 2, "bits": 4, "group_size": 48}])", {"layer 2", "32, 64 or 128", "found 48"}},
      {R"([{"layer_idx": 2, "bits": 4}, {"layer_idx": 2, "bits": 8}])", {"entry 1", "layer 2", "two entries"}},
  };
  for (const auto& [text, words] : cases) {
    const auto file = folder.write("kv_config.json", text);
    const std::string said = refusal([&] { return KvQuant::choose("config", checkpoint, 1); });
    expect_words(said, words);
    expect_words(said, {file.string()});
  }
}

}  // namespace
}  // namespace galley::models
