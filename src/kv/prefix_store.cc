#include "kv/prefix_store.h"

#include <fmt/format.h>
#include <sqlite3.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "ops/error.h"

namespace galley::kv {
namespace {

constexpr int kFormat = 1;                // of the tables; a file of another one is not used
constexpr int kApplication = 0x67616C79;  // "galy", SQLite's mark of whose file it is
constexpr int kBusyMs = 200;              // another server with the same folder may be writing
constexpr std::size_t kShrinkTo = 95;     // percent of the bound, so that not every save has to make room

constexpr std::uint64_t kPrime = 0x00000100000001B3ULL;  // FNV-1a's, over words of 8 bytes
constexpr std::uint64_t kBasis = 0xCBF29CE484222325ULL;

std::uint64_t hash(std::span<const std::byte> bytes, std::uint64_t state = kBasis) {
  std::size_t at = 0;
  for (; at + sizeof(std::uint64_t) <= bytes.size(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, sizeof word);
    state = (state ^ word) * kPrime;
    state ^= state >> 29U;  // FNV over wide words alone leaves the low bits weak
  }
  for (; at < bytes.size(); ++at) state = (state ^ static_cast<std::uint64_t>(bytes[at])) * kPrime;
  return state;
}

std::int64_t checksum(std::span<const std::int32_t> tokens, std::span<const std::byte> bytes) {
  return static_cast<std::int64_t>(hash(bytes, hash(std::as_bytes(tokens))));
}

struct SqliteError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace

struct PrefixStore::Close {
  void operator()(sqlite3* handle) const { sqlite3_close_v2(handle); }
  void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
};

/// A prepared statement. Use: bind, step until false, reset; all throw SqliteError. One left in the middle holds a
/// lock.
class PrefixStore::Statement {
 public:
  Statement() = default;
  Statement(sqlite3* handle, const char* sql) {
    sqlite3_stmt* raw = nullptr;
    if (sqlite3_prepare_v3(handle, sql, -1, SQLITE_PREPARE_PERSISTENT, &raw, nullptr) != SQLITE_OK) {
      throw SqliteError(sqlite3_errmsg(handle));
    }
    statement_.reset(raw);
  }
  void bind(int at, std::int64_t value) { check(sqlite3_bind_int64(get(), at, value)); }
  void bind(int at, std::span<const std::byte> bytes) {  // borrowed until the next reset
    check(sqlite3_bind_blob64(get(), at, bytes.data(), bytes.size(), SQLITE_STATIC));
  }
  bool step() {
    const int result = sqlite3_step(get());
    if (result == SQLITE_ROW) return true;
    if (result == SQLITE_DONE) return false;
    throw SqliteError(sqlite3_errmsg(sqlite3_db_handle(get())));
  }
  void reset() {
    sqlite3_reset(get());
    sqlite3_clear_bindings(get());
  }
  [[nodiscard]] std::int64_t integer(int column) const { return sqlite3_column_int64(get(), column); }
  /// Valid until the next step or reset.
  [[nodiscard]] std::span<const std::byte> blob(int column) const {
    const auto* data = static_cast<const std::byte*>(sqlite3_column_blob(get(), column));
    return {data, static_cast<std::size_t>(sqlite3_column_bytes(get(), column))};
  }

 private:
  [[nodiscard]] sqlite3_stmt* get() const { return statement_.get(); }
  void check(int result) const {
    if (result != SQLITE_OK) throw SqliteError(sqlite3_errmsg(sqlite3_db_handle(get())));
  }
  std::unique_ptr<sqlite3_stmt, Close> statement_;
};

struct PrefixStore::Database {
  std::unique_ptr<sqlite3, Close> handle;
  Statement find, touch, insert, remove, remove_oldest;

  /// Runs statements that yield nothing.
  void run(const std::string& sql) const {
    char* message = nullptr;
    if (sqlite3_exec(handle.get(), sql.c_str(), nullptr, nullptr, &message) == SQLITE_OK) return;
    const std::string text = message != nullptr ? message : "unknown error";
    sqlite3_free(message);
    throw SqliteError(text);
  }
  [[nodiscard]] std::int64_t number(const char* sql) const {
    Statement statement(handle.get(), sql);
    return statement.step() ? statement.integer(0) : 0;
  }
};

PrefixStore::PrefixStore(Options options) : options_(std::move(options)) {
  std::error_code error;
  std::filesystem::create_directories(options_.folder, error);
  if (error || !std::filesystem::is_directory(options_.folder)) {
    throw Error(400,
                fmt::format("--prompt-cache-dir: {} can't be made a folder: {}", options_.folder.string(),
                            error ? error.message() : "something else has that name"),
                "", "prompt-cache-dir");
  }
  file_ = options_.folder / fmt::format("galley-{:016x}.kv", hash(std::as_bytes(std::span(options_.identity))));
  try {
    open();
  } catch (const SqliteError& failure) {
    give_up(failure.what());
  }
}

PrefixStore::~PrefixStore() = default;
PrefixStore::PrefixStore(PrefixStore&&) noexcept = default;
PrefixStore& PrefixStore::operator=(PrefixStore&&) noexcept = default;

void PrefixStore::open() {
  database_ = std::make_unique<Database>();
  Database& db = *database_;
  sqlite3* raw = nullptr;
  const int opened =
      sqlite3_open_v2(file_.c_str(), &raw, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  db.handle.reset(raw);
  if (opened != SQLITE_OK) {
    throw Error(400, fmt::format("--prompt-cache-dir: {} can't be written: {}", file_.string(), sqlite3_errmsg(raw)),
                "", "prompt-cache-dir");
  }
  sqlite3_busy_timeout(raw, kBusyMs);
  if (const auto mark = db.number("PRAGMA application_id"); mark == 0) {
    if (db.number("SELECT count(*) FROM sqlite_master") != 0) throw SqliteError("it is some other program's database");
  } else if (mark != kApplication) {
    throw SqliteError("it is some other program's database");
  } else if (db.number("PRAGMA user_version") != kFormat) {
    throw SqliteError("it was written by another version of galley");
  }
  // A write-ahead log: a crash, of the machine too, loses the last blocks at most.
  db.run("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON");
  db.run(
      fmt::format("PRAGMA application_id = {}; PRAGMA user_version = {};"
                  "CREATE TABLE IF NOT EXISTS identity (text BLOB PRIMARY KEY) WITHOUT ROWID;"
                  "CREATE TABLE IF NOT EXISTS block (id INTEGER PRIMARY KEY AUTOINCREMENT,"
                  " parent INTEGER REFERENCES block (id), tokens BLOB NOT NULL, used INTEGER NOT NULL,"
                  " checksum INTEGER NOT NULL, bytes BLOB NOT NULL);"
                  // The root is NULL for the foreign key's sake, and NULLs are all distinct: hence ifnull.
                  "CREATE UNIQUE INDEX IF NOT EXISTS text ON block (ifnull(parent, 0), tokens);"
                  "CREATE INDEX IF NOT EXISTS family ON block (parent);"
                  "CREATE INDEX IF NOT EXISTS age ON block (used)",
                  kApplication, kFormat));
  const auto identity = std::as_bytes(std::span(options_.identity));
  Statement known(raw, "SELECT text FROM identity");
  if (!known.step()) {
    Statement write(raw, "INSERT INTO identity (text) VALUES (?1)");
    write.bind(1, identity);
    write.step();
  } else if (!std::ranges::equal(known.blob(0), identity)) {
    throw SqliteError("its blocks are of another model or KV type");
  }
  db.find = {raw, "SELECT id, checksum, bytes FROM block WHERE ifnull(parent, 0) = ?1 AND tokens = ?2"};
  db.touch = {raw, "UPDATE block SET used = ?2 WHERE id = ?1"};
  db.insert = {raw,
               "INSERT INTO block (parent, tokens, used, checksum, bytes) VALUES (nullif(?1, 0), ?2, ?3, ?4, ?5)"
               " ON CONFLICT (ifnull(parent, 0), tokens) DO UPDATE SET used = excluded.used,"
               " checksum = iif(length(bytes) > length(excluded.bytes), checksum, excluded.checksum),"
               " bytes = iif(length(bytes) > length(excluded.bytes), bytes, excluded.bytes) RETURNING id"};
  db.remove = {raw,
               "WITH RECURSIVE doomed (id) AS (SELECT ?1 UNION SELECT block.id FROM block JOIN doomed"
               " ON block.parent = doomed.id) DELETE FROM block WHERE id IN doomed"};
  db.remove_oldest = {raw,
                      "DELETE FROM block WHERE id IN (SELECT id FROM block AS old WHERE NOT EXISTS"
                      " (SELECT 1 FROM block WHERE parent = old.id) ORDER BY used LIMIT 1) RETURNING id"};
  size_ = static_cast<std::size_t>(db.number("SELECT count(*) FROM block"));
  clock_ = db.number("SELECT max(used) FROM block");
  newest_ = db.number("SELECT max(id) FROM block");
}

void PrefixStore::fail(const std::string& why) {
  const int code = sqlite3_errcode(database_->handle.get());
  if (code != SQLITE_BUSY && code != SQLITE_LOCKED) give_up(why);  // those pass: another server uses the file
}

void PrefixStore::give_up(const std::string& why) {
  database_.reset();
  size_ = 0;
  if (options_.warn) {
    options_.warn(fmt::format("prompt cache {}: {}; it is not used, and nothing is saved. Remove it to start anew",
                              file_.string(), why));
  }
}

std::optional<PrefixStore::Stored> PrefixStore::load(Id parent, std::span<const std::int32_t> tokens,
                                                     std::span<std::byte> bytes) {
  if (!database_) return {};
  try {
    Statement& find = database_->find;
    find.reset();
    find.bind(1, parent);
    find.bind(2, std::as_bytes(tokens));
    if (!find.step()) return {};
    const Id id = find.integer(0);
    const std::span<const std::byte> stored = find.blob(2);
    const std::size_t size = stored.size();
    const bool whole = fits(size) && size <= bytes.size() && find.integer(1) == checksum(tokens, stored);
    if (whole) std::memcpy(bytes.data(), stored.data(), stored.size());
    find.reset();
    if (!whole) {
      if (options_.warn) options_.warn(fmt::format("prompt cache {}: a damaged block was removed", file_.string()));
      database_->remove.reset();
      database_->remove.bind(1, id);
      database_->remove.step();
      size_ = static_cast<std::size_t>(database_->number("SELECT count(*) FROM block"));
      return {};
    }
    database_->touch.reset();
    database_->touch.bind(1, id);
    database_->touch.bind(2, ++clock_);
    database_->touch.step();
    return Stored{id, size};
  } catch (const SqliteError& failure) {
    fail(failure.what());
    return {};
  }
}

std::optional<PrefixStore::Id> PrefixStore::save(Id parent, std::span<const std::int32_t> tokens,
                                                 std::span<const std::byte> bytes) {
  if (!database_ || !fits(bytes.size()) || options_.max_bytes < options_.block_bytes) return {};
  try {
    Statement& insert = database_->insert;
    insert.reset();
    insert.bind(1, parent);
    insert.bind(2, std::as_bytes(tokens));
    insert.bind(3, ++clock_);
    insert.bind(4, checksum(tokens, bytes));
    insert.bind(5, bytes);
    if (!insert.step()) return {};
    const Id id = insert.integer(0);
    insert.reset();
    if (id > newest_) ++size_;  // else it was there already
    newest_ = std::max(newest_, id);
    if (size_ * options_.block_bytes > options_.max_bytes) shrink();
    return id;
  } catch (const SqliteError& failure) {
    // Expected: the parent was removed to make room, so its continuation has no place.
    if (sqlite3_extended_errcode(database_->handle.get()) != SQLITE_CONSTRAINT_FOREIGNKEY) fail(failure.what());
    if (database_) database_->insert.reset();
    return {};
  }
}

void PrefixStore::shrink() {
  size_ = static_cast<std::size_t>(database_->number("SELECT count(*) FROM block"));
  const std::size_t target = std::max<std::size_t>(1, options_.max_bytes / options_.block_bytes * kShrinkTo / 100);
  for (; size_ > target; --size_) {  // one by one, as each that goes may leave another end
    const bool removed = database_->remove_oldest.step();
    database_->remove_oldest.reset();
    if (!removed) return;
  }
}

}  // namespace galley::kv
