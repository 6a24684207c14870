// Blocks on disk: a tree that is found again, and a cache whose damage hurts nobody.
#include "kv/prefix_store.h"

#include <gtest/gtest.h>
#include <sqlite3.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <vector>

#include "ops/error.h"
#include "temporary_folder.h"

namespace galley::kv {
namespace {

using Tokens = std::vector<std::int32_t>;
using Bytes = std::vector<std::byte>;
constexpr std::size_t kBytes = 5000;

Bytes bytes_of(int seed) {
  Bytes bytes(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i)
    bytes[i] = static_cast<std::byte>((i * 31 + static_cast<std::size_t>(seed)) % 251);
  return bytes;
}

class PrefixStoreTest : public ::testing::Test {
 protected:
  PrefixStore open(const std::string& identity = "model a", std::size_t blocks = 1000) {
    return PrefixStore({folder / "cache", identity, kBytes, 0, blocks * kBytes,
                        [this](const std::string& text) { warnings.push_back(text); }});
  }
  static std::optional<PrefixStore::Id> id_of(const std::optional<PrefixStore::Stored>& stored) {
    return stored ? std::optional(stored->id) : std::nullopt;
  }
  static std::optional<int> seed_found(PrefixStore& store, PrefixStore::Id parent, const Tokens& tokens) {
    Bytes bytes(kBytes);
    if (!store.load(parent, tokens, bytes)) return {};
    for (int seed = 0; seed < 250; ++seed) {
      if (bytes == bytes_of(seed)) return seed;
    }
    return -1;
  }
  /// Changes the file behind the store's back.
  static void run(const std::filesystem::path& file, const std::string& sql) {
    sqlite3* handle = nullptr;
    ASSERT_EQ(sqlite3_open(file.c_str(), &handle), SQLITE_OK);
    EXPECT_EQ(sqlite3_exec(handle, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK) << sqlite3_errmsg(handle);
    sqlite3_close(handle);
  }

  galley::testing::TemporaryFolder temporary;
  std::filesystem::path folder = temporary.path();
  std::vector<std::string> warnings;
};

TEST_F(PrefixStoreTest, ATreeIsFoundAgainAfterReopening) {
  {
    PrefixStore store = open();
    const auto root = store.save(PrefixStore::kRoot, Tokens{1, 2}, bytes_of(1));
    ASSERT_TRUE(root);
    ASSERT_TRUE(store.save(*root, Tokens{3, 4}, bytes_of(2)));
    ASSERT_TRUE(store.save(*root, Tokens{3, 5}, bytes_of(3)));
    ASSERT_TRUE(store.save(PrefixStore::kRoot, Tokens{3, 4}, bytes_of(4)));
    EXPECT_EQ(store.size(), 4U);
  }
  PrefixStore store = open();
  EXPECT_EQ(store.size(), 4U);
  Bytes bytes(kBytes);
  const auto root = id_of(store.load(PrefixStore::kRoot, Tokens{1, 2}, bytes));
  ASSERT_TRUE(root);
  EXPECT_EQ(bytes, bytes_of(1));
  EXPECT_EQ(seed_found(store, *root, {3, 4}), 2);
  EXPECT_EQ(seed_found(store, *root, {3, 5}), 3);
  EXPECT_EQ(seed_found(store, PrefixStore::kRoot, {3, 4}), 4) << "the same tokens after another text";
  EXPECT_FALSE(seed_found(store, *root, {3}));
  EXPECT_FALSE(seed_found(store, PrefixStore::kRoot, {1, 3}));
  EXPECT_TRUE(warnings.empty());
}

TEST_F(PrefixStoreTest, SavingTheSameTextTwiceKeepsOneBlock) {
  PrefixStore store = open();
  const auto first = store.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1));
  EXPECT_EQ(store.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1)), first);
  EXPECT_EQ(store.size(), 1U);
}

TEST_F(PrefixStoreTest, ABlockMayLackItsLastPartUntilItIsSavedWhole) {
  PrefixStore store({folder / "cache", "model a", kBytes, 2000, 100 * kBytes});
  const Bytes whole = bytes_of(1), part(whole.begin(), whole.begin() + 2000);
  const auto id = store.save(PrefixStore::kRoot, Tokens{1}, part);
  ASSERT_TRUE(id);
  EXPECT_FALSE(store.save(PrefixStore::kRoot, Tokens{2}, std::span(whole).first(3000))) << "neither size";
  Bytes bytes(kBytes);
  auto found = store.load(PrefixStore::kRoot, Tokens{1}, bytes);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, 2000U);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), bytes.begin()));
  EXPECT_EQ(store.save(PrefixStore::kRoot, Tokens{1}, whole), id);
  EXPECT_EQ(store.save(PrefixStore::kRoot, Tokens{1}, part), id) << "what is whole stays";
  found = store.load(PrefixStore::kRoot, Tokens{1}, bytes);
  ASSERT_TRUE(found);
  EXPECT_EQ(found->bytes, kBytes);
  EXPECT_EQ(bytes, whole);
  EXPECT_EQ(store.size(), 1U);
  EXPECT_TRUE(store.usable());
}

TEST_F(PrefixStoreTest, AnotherIdentityHasAFileOfItsOwn) {
  PrefixStore a = open("model a"), b = open("model b");
  ASSERT_TRUE(a.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1)));
  EXPECT_FALSE(seed_found(b, PrefixStore::kRoot, {1}));
  EXPECT_NE(a.file(), b.file());
}

TEST_F(PrefixStoreTest, AFileWithAnotherIdentityInsideIsNotUsed) {
  std::filesystem::path a_file, b_file;
  {
    PrefixStore a = open("model a"), b = open("model b");
    ASSERT_TRUE(a.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1)));
    a_file = a.file();
    b_file = b.file();
  }
  std::filesystem::copy_file(a_file, b_file, std::filesystem::copy_options::overwrite_existing);
  PrefixStore b = open("model b");
  EXPECT_FALSE(b.usable());
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("another model or KV type"), std::string::npos) << warnings[0];
  EXPECT_FALSE(seed_found(b, PrefixStore::kRoot, {1}));
  EXPECT_FALSE(b.save(PrefixStore::kRoot, Tokens{2}, bytes_of(2)));
}

TEST_F(PrefixStoreTest, BeyondItsSizeTheTextsUsedLongestAgoLoseTheirEnds) {
  PrefixStore store = open("model a", 10);
  // Two texts of 5 blocks; the first is used again, then the file is filled up.
  const auto write = [&](int text) {
    PrefixStore::Id at = PrefixStore::kRoot;
    for (int i = 0; i < 5; ++i) at = store.save(at, Tokens{text, i}, bytes_of(text)).value();
  };
  const auto length = [&](int text) {
    Bytes bytes(kBytes);
    PrefixStore::Id at = PrefixStore::kRoot;
    for (int i = 0; i < 5; ++i) {
      const auto next = id_of(store.load(at, Tokens{text, i}, bytes));
      if (!next) return i;
      at = *next;
    }
    return 5;
  };
  write(1);
  write(2);
  EXPECT_EQ(length(1), 5);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(store.save(PrefixStore::kRoot, Tokens{100 + i}, bytes_of(i)));
  EXPECT_LE(store.size(), 10U);
  EXPECT_EQ(length(1), 5);
  EXPECT_LT(length(2), 5);
  EXPECT_GT(length(2), 0) << "a beginning outlives what continues it";
  PrefixStore other = open("model a", 10);
  EXPECT_TRUE(other.save(PrefixStore::kRoot, Tokens{7}, bytes_of(7))) << "no lock is left behind";
}

TEST_F(PrefixStoreTest, ABlockWhoseBeginningIsGoneCanNotBeKept) {
  PrefixStore store = open();
  EXPECT_FALSE(store.save(12345, Tokens{1}, bytes_of(1)));
  EXPECT_TRUE(store.usable()) << "that is no fault of the file";
  EXPECT_TRUE(store.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1)));
  EXPECT_TRUE(warnings.empty());
}

TEST_F(PrefixStoreTest, ADamagedBlockIsRemovedWithWhatContinuesIt) {
  std::filesystem::path file;
  {
    PrefixStore store = open();
    file = store.file();
    const auto root = store.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1)).value();
    const auto middle = store.save(root, Tokens{2}, bytes_of(2)).value();
    store.save(middle, Tokens{3}, bytes_of(3)).value();
  }
  run(file, "UPDATE block SET bytes = zeroblob(5000) WHERE tokens = x'02000000'");
  PrefixStore store = open();
  Bytes bytes(kBytes);
  const auto root = id_of(store.load(PrefixStore::kRoot, Tokens{1}, bytes));
  ASSERT_TRUE(root);
  EXPECT_FALSE(store.load(*root, Tokens{2}, bytes));
  EXPECT_EQ(store.size(), 1U);
  EXPECT_TRUE(store.usable());
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_NE(warnings[0].find("damaged"), std::string::npos);
  EXPECT_TRUE(store.save(*root, Tokens{2}, bytes_of(2)));
}

TEST_F(PrefixStoreTest, AFileThatIsNoneOfOursIsLeftAsItIs) {
  std::filesystem::path file;
  {
    PrefixStore store = open();
    file = store.file();
  }
  for (const char* wal : {"-wal", "-shm"}) std::filesystem::remove(file.string() + wal);
  const std::string text(10000, 'x');
  std::ofstream(file, std::ios::binary | std::ios::trunc) << text;
  {
    PrefixStore store = open();
    EXPECT_FALSE(store.usable());
    ASSERT_EQ(warnings.size(), 1U);
  }
  std::ifstream in(file, std::ios::binary);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}), text);

  std::filesystem::remove(file);
  run(file, "CREATE TABLE notes (text)");
  PrefixStore store = open();
  EXPECT_FALSE(store.usable());
  EXPECT_NE(warnings.back().find("other program"), std::string::npos) << warnings.back();
  run(file, "SELECT count(*) FROM notes");
}

TEST_F(PrefixStoreTest, AFolderThatCanNotBeMadeIsTheUsersToRepair) {
  std::ofstream(folder / "cache") << "a file";
  try {
    open();
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), 400);
    EXPECT_NE(std::string(error.what()).find((folder / "cache").string()), std::string::npos);
  }
}

TEST_F(PrefixStoreTest, TwoServersMayShareAFile) {
  PrefixStore a = open(), b = open();
  const auto id = a.save(PrefixStore::kRoot, Tokens{1}, bytes_of(1));
  ASSERT_TRUE(id);
  EXPECT_EQ(seed_found(b, PrefixStore::kRoot, {1}), 1);
  ASSERT_TRUE(b.save(*id, Tokens{2}, bytes_of(2)));
  EXPECT_EQ(seed_found(a, *id, {2}), 2);
}

}  // namespace
}  // namespace galley::kv
