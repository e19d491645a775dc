// The page ledger: who holds which page. Works on arrays that the caller owns (dsv4_npu.alloc.state.LedgerState) and
// keeps no state of its own, so its Python twin can be compared with it array by array. Knows nothing of Python.
#pragma once

#include <cstdint>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace dsv4 {

enum Family : int { FULL = 0, SWA = 1, C128 = 2, ROW = 3 };
enum PageState : uint8_t { FREE = 0, HELD = 1, OUTSIDE = 2, TAKEN = 3, QUARANTINED = 4 };
enum RowFlag : uint8_t { GAP = 1, HOLES = 2 };
// Positions in Arrays::counters; the first four have one entry per family.
inline constexpr int N_FREE = 0, Q_HEAD = 4, Q_LEN = 8, PEAK = 12, TAG = 16, STEP = 17, N_DIRTY = 18, N_SWA_LOG = 19;

inline constexpr int64_t kC4Ratio = 4;
inline constexpr int64_t kC128Ratio = 128;
inline constexpr int64_t kNoTail = -1;

inline int64_t ceil_div(int64_t value, int64_t unit) { return (value + unit - 1) / unit; }
inline int64_t ceil_to(int64_t value, int64_t unit) { return ceil_div(value, unit) * unit; }
// Rounds towards minus infinity, as Python does.
inline int64_t floor_div(int64_t value, int64_t unit) {
  const int64_t quotient = value / unit;
  return quotient - (value % unit != 0 && value < 0);
}
inline int64_t c128_columns(int64_t tokens, int64_t c128_page) { return ceil_div(tokens / kC128Ratio, c128_page); }

enum class ErrorKind { Input, Capacity, Ownership };

// Thrown before anything changed; becomes the exception of the same name in dsv4_npu.errors.
struct Failure {
  ErrorKind kind;
  std::string text;
};

struct Sizes {
  int64_t page, c128_page, window, row_width, columns, sidecar_columns, group_tokens;
};

// See LedgerState for shapes and meanings.
struct Arrays {
  int32_t* tables;
  int64_t swa_base, c128_base;
  uint8_t* dirty;
  int64_t* dirty_list;
  int64_t* counters;
  int64_t total[4];
  uint8_t* page_state[4];
  int32_t* free_list[4];
  int32_t* q_page[4];
  int64_t* q_tag[4];
  int32_t *full_owner, *full_readers, *swa_full, *swa_log;
  uint8_t* swa_logged;
  int32_t* c128_count;
  int64_t *committed, *allocated;
  int32_t *held_cols, *c128_cols, *shared_cols, *evict_cursor, *swa_start;
  uint8_t* flags;
};

struct Need {
  int64_t full = 0, swa = 0, c128 = 0;
  bool any() const { return full || swa || c128; }
  bool operator==(const Need&) const = default;
};

struct Pages {
  std::vector<int32_t> full, swa, c128;
};

// Where the slots of a range of positions go; each call moves the pointers on.
struct SlotCursor {
  int64_t *full, *swa, *c4, *c128;
};

struct SlotCounts {
  int64_t full = 0, c4 = 0, c128 = 0;
};

using Ids = std::span<const int64_t>;
using Ids32 = std::span<const int32_t>;

class Ledger {
 public:
  Ledger(const Sizes& sizes, const Arrays& arrays) : z(sizes), a(arrays) {}

  // pages.cpp
  Pages take(const Need& need);
  void untake(Ids32 full, Ids32 swa, Ids32 c128);
  void drain(int64_t horizon);
  void free_pages(Ids pages);
  void free_swa(Ids pages);
  void retain(Ids pages);
  void release(Ids pages);
  int64_t collect(std::span<int64_t> index, std::span<int64_t> value);
  std::vector<int32_t> drain_swa_log();

  // rows.cpp
  int64_t open_row();
  std::vector<int32_t> close(int64_t row);
  void commit(Ids rows, Ids lens);
  void rewind(int64_t row, int64_t target);
  void attach(int64_t row, Ids pages, Ids c128, int64_t length);
  void replace_c128(int64_t row, Ids pages);
  Pages take_over(int64_t row, int64_t columns);
  void trim(int64_t row, int64_t boundary);
  int64_t evict(int64_t row, int64_t width);
  void free_slots(Ids slots);
  void free_swa_slots(Ids slots);

  // extend.cpp
  Need plan(Ids rows, Ids new_lens, Ids tails) const;
  void write(Ids rows, Ids old_lens, Ids new_lens, Ids tails, Ids32 full, Ids32 swa, Ids32 c128);
  void decode_step(Ids rows, int64_t reserve, int64_t width);
  void check_span(int64_t row, int64_t start, int64_t stop) const;
  void count_slots(int64_t row, int64_t start, int64_t stop, SlotCounts& counts) const;
  void fill_slots(int64_t row, int64_t start, int64_t stop, SlotCursor& out) const;

  Sizes z;
  Arrays a;

 private:
  // Messages are built out of line, so that checks stay small.
  [[noreturn]] static void fail(ErrorKind kind, std::string text) { throw Failure{kind, std::move(text)}; }

  int64_t& counter(int which) const { return a.counters[which]; }
  int64_t free_count(int family) const { return a.counters[N_FREE + family]; }
  int32_t* row_pages(int64_t row) const { return a.tables + row * z.columns; }
  int32_t* row_sidecar(int64_t row) const { return a.tables + a.c128_base + row * z.sidecar_columns; }
  int32_t& swa_of(int64_t full) const { return a.tables[a.swa_base + full]; }

  void check_room(const Need& need) const;
  void check_taken(int family, Ids32 pages) const;
  void check_outside(int64_t page) const;
  void check_unread(int64_t page) const;
  void check_counted(int64_t page) const;
  void check_open(int64_t row) const;
  void check_whole(int64_t row) const;
  void check_width(int64_t row, int64_t length) const;
  void check_window(int64_t row, int64_t length, const char* what) const;
  void check_extend(int64_t row, int64_t new_len) const;
  void check_prefix(int64_t row, Ids pages, Ids c128, int64_t length) const;
  bool readable(int64_t row, int64_t length) const;

  void step() const { ++a.counters[STEP]; }
  void mark(int64_t index) const;
  int32_t pop(int family, PageState state) const;
  void note_peak(int family) const;
  void push(int family, int32_t page) const;
  void put(int family, int32_t page) const;
  void map(int64_t full, int32_t swa) const;
  int32_t unmap(int64_t full) const;  // the SWA page that was freed, or 0
  int32_t free_full(int64_t page) const;
  void drop_c128(int32_t page) const;

  void set_column(int64_t row, int64_t column, int32_t page) const;
  void set_sidecar(int64_t row, int64_t column, int32_t page) const;
  bool owns(int64_t row, int64_t page) const { return a.page_state[FULL][page] == HELD && a.full_owner[page] == row; }
  std::vector<int64_t> slot_pages(Ids slots) const;
  void swap_c128(int64_t row, Ids pages) const;

  // A model with plain attention has FULL pages and no other family.
  bool full_only() const { return a.total[SWA] == 0 && a.total[C128] == 0; }
  int64_t sidecar_for(int64_t tokens) const { return full_only() ? 0 : c128_columns(tokens, z.c128_page); }
  int64_t decode_len(int64_t row, int64_t reserve) const;
  int64_t swa_from(int64_t row, int64_t new_len, int64_t tail) const;
  bool remap(int64_t row, int64_t first) const;
  Need need_of(int64_t row, int64_t new_len, int64_t tail) const;
  template <class NextFull, class NextSwa, class NextC128>
  void write_row(int64_t row, int64_t new_len, int64_t tail, const Need& need, NextFull&&, NextSwa&&, NextC128&&);
};

inline void append(std::string& text, const char* part) { text += part; }
inline void append(std::string& text, const std::string& part) { text += part; }
inline void append(std::string& text, int64_t part) { text += std::to_string(part); }
template <class... Parts>
std::string message(Parts&&... parts) {
  std::string text;
  (append(text, parts), ...);
  return text;
}

inline constexpr const char* kFamilyNames[] = {"FULL", "SWA", "C128", "ROW"};
inline constexpr const char* kStateNames[] = {"free", "held", "held outside", "taken by a transaction", "quarantined"};

}  // namespace dsv4
