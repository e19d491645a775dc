// Request rows: open, close, commit, rewind, shared prefixes, trim, window eviction.
#include <algorithm>

#include "ledger.h"

namespace dsv4 {
namespace {

// Calls visit(column, page) for every non-empty entry of a table row; runs of empty entries are skipped fast.
template <class Visit>
void for_each_page(const int32_t* pages, int64_t count, Visit&& visit) {
  constexpr int64_t kBlock = 16;
  int64_t column = 0;
  for (; column + kBlock <= count; column += kBlock) {
    int32_t any = 0;
    for (int64_t i = 0; i < kBlock; ++i) any |= pages[column + i];
    if (!any) continue;
    for (int64_t i = column; i < column + kBlock; ++i)
      if (pages[i]) visit(i, pages[i]);
  }
  for (; column < count; ++column)
    if (pages[column]) visit(column, pages[column]);
}

}  // namespace

void Ledger::set_column(int64_t row, int64_t column, int32_t page) const {
  row_pages(row)[column] = page;
  mark(row * z.columns + column);
}

void Ledger::set_sidecar(int64_t row, int64_t column, int32_t page) const {
  row_sidecar(row)[column] = page;
  mark(a.c128_base + row * z.sidecar_columns + column);
}

void Ledger::check_open(int64_t row) const {
  if (row < 1 || row > a.total[ROW])
    fail(ErrorKind::Input, message("row ", row, ": 1 to ", a.total[ROW], " is allowed"));
  if (a.page_state[ROW][row] != HELD) fail(ErrorKind::Ownership, message("row ", row, " is not open"));
}

void Ledger::check_whole(int64_t row) const {
  if (a.flags[row] & HOLES)
    fail(ErrorKind::Ownership, message("row ", row, ": pages were freed by slot; it can only be closed"));
}

void Ledger::check_width(int64_t row, int64_t length) const {
  if (length > z.row_width)
    fail(ErrorKind::Capacity, message("row ", row, ": ", length, " tokens, the row holds ", z.row_width));
}

void Ledger::check_extend(int64_t row, int64_t new_len) const {
  check_open(row);
  check_whole(row);
  if (new_len < 0)
    fail(ErrorKind::Input, message("row ", row, ": new length ", new_len, ": 0 or more is allowed"));
  check_width(row, new_len);
}

bool Ledger::readable(int64_t row, int64_t length) const {
  return a.swa_start[row] * z.page <= std::max<int64_t>(0, length - z.window + 1);
}

void Ledger::check_window(int64_t row, int64_t length, const char* what) const {
  if (!readable(row, length))
    fail(ErrorKind::Ownership,
         message("row ", row, ": ", what, " at ", length, " reads SWA from position ",
                 std::max<int64_t>(0, length - z.window + 1), ", resident from ", a.swa_start[row] * z.page));
}

int64_t Ledger::open_row() {
  if (!free_count(ROW))
    fail(ErrorKind::Capacity, message("request rows: need 1, free 0 of ", a.total[ROW], ", waiting for an epoch ",
                                      counter(Q_LEN + ROW)));
  step();
  const int32_t row = pop(ROW, HELD);
  note_peak(ROW);
  return row;
}

std::vector<int32_t> Ledger::close(int64_t row) {
  check_open(row);
  step();
  std::vector<int32_t> freed;
  for_each_page(row_pages(row), z.columns, [&](int64_t column, int32_t page) {
    set_column(row, column, 0);
    if (!owns(row, page)) {
      --a.full_readers[page];
    } else if (const int32_t swa = free_full(page)) {
      freed.push_back(swa);
    }
  });
  for_each_page(row_sidecar(row), z.sidecar_columns, [&](int64_t column, int32_t page) {
    set_sidecar(row, column, 0);
    drop_c128(page);
  });
  a.committed[row] = a.allocated[row] = 0;
  a.held_cols[row] = a.c128_cols[row] = a.shared_cols[row] = a.evict_cursor[row] = a.swa_start[row] = 0;
  a.flags[row] = 0;
  put(ROW, static_cast<int32_t>(row));
  return freed;
}

void Ledger::commit(Ids rows, Ids lens) {
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t row = rows[i];
    if (row == 0) continue;
    check_open(row);
    if (lens[i] < a.committed[row] || lens[i] > a.allocated[row])
      fail(ErrorKind::Ownership,
           message("row ", row, ": committed = ", lens[i], ": ", a.committed[row], " (committed) to ",
                   a.allocated[row], " (allocated) is allowed; only rewind goes back"));
  }
  step();
  for (size_t i = 0; i < rows.size(); ++i)
    if (rows[i]) a.committed[rows[i]] = lens[i];
}

void Ledger::rewind(int64_t row, int64_t target) {
  check_open(row);
  const int64_t low = a.shared_cols[row] * z.page, high = a.committed[row];
  if (target < low || target > high)
    fail(ErrorKind::Ownership, message("row ", row, ": rewind to ", target, ": ", low, " (shared prefix) to ", high,
                                       " (committed) is allowed"));
  check_window(row, target, "rewind");
  step();
  a.committed[row] = target;
}

void Ledger::check_prefix(int64_t row, Ids pages, Ids c128, int64_t length) const {
  check_open(row);
  check_whole(row);
  if (length < 0 || length % z.page || (!full_only() && length / kC128Ratio % z.c128_page))
    fail(ErrorKind::Input, message("row ", row, ": prefix of ", length, " tokens: whole pages of ", z.page,
                                   " tokens and whole C128 pages of ", z.group_tokens, " tokens are shared"));
  check_width(row, length);
  const int64_t low = a.shared_cols[row] * z.page;
  if (length < low)
    fail(ErrorKind::Ownership,
         message("row ", row, ": prefix of ", length, " tokens is shorter than the shared ", low));
  const int64_t groups = full_only() ? 0 : length / z.group_tokens;
  if (std::ssize(pages) != length / z.page || std::ssize(c128) != groups)
    fail(ErrorKind::Input, message("row ", row, ": prefix of ", length, " tokens: ", std::ssize(pages), " FULL and ",
                                   std::ssize(c128), " C128 pages, ", length / z.page, " and ", groups,
                                   " are needed"));
  std::vector<bool> seen(a.total[FULL] + 1);
  for (const int64_t page : pages) {
    check_outside(page);
    if (seen[page]) fail(ErrorKind::Input, message("FULL page ", page, " appears twice in one prefix"));
    seen[page] = true;
  }
  for (const int64_t page : c128) check_counted(page);
  const int64_t end = std::max(a.committed[row], length);
  const int64_t windowed = full_only() ? 0 : std::ssize(pages);
  for (int64_t column = std::max<int64_t>(0, end - z.window + 1) / z.page; column < windowed; ++column)
    if (!swa_of(pages[column]))
      fail(ErrorKind::Ownership, message("row ", row, ": prefix of ", length, " tokens: FULL page ", pages[column],
                                         " in the last window has no SWA page"));
}

void Ledger::attach(int64_t row, Ids pages, Ids c128, int64_t length) {
  check_prefix(row, pages, c128, length);
  step();
  const int64_t columns = std::ssize(pages);
  for (const int64_t page : pages) ++a.full_readers[page];
  for (int64_t column = 0; column < columns; ++column) {
    const int32_t old = row_pages(row)[column];
    set_column(row, column, static_cast<int32_t>(pages[column]));
    if (!old) continue;
    if (owns(row, old)) {
      free_full(old);
    } else {
      --a.full_readers[old];
    }
  }
  swap_c128(row, c128);
  if (a.swa_start[row] <= columns && !full_only()) {
    int64_t start = columns;
    while (start > 0 && swa_of(pages[start - 1])) --start;
    a.swa_start[row] = static_cast<int32_t>(start);
  }
  a.shared_cols[row] = static_cast<int32_t>(columns);
  a.held_cols[row] = std::max(a.held_cols[row], static_cast<int32_t>(columns));
  a.allocated[row] = std::max(a.allocated[row], length);
  a.committed[row] = std::max(a.committed[row], length);
}

void Ledger::replace_c128(int64_t row, Ids pages) {
  check_open(row);
  if (std::ssize(pages) > z.sidecar_columns)
    fail(ErrorKind::Capacity, message("row ", row, ": ", std::ssize(pages), " C128 pages, the row has ",
                                      z.sidecar_columns, " columns"));
  for (const int64_t page : pages) check_counted(page);
  step();
  swap_c128(row, pages);
}

// All new pages are counted before the first old one is dropped: a page in both must not pass through 0.
void Ledger::swap_c128(int64_t row, Ids pages) const {
  for (const int64_t page : pages) ++a.c128_count[page];
  for (int64_t column = 0; column < std::ssize(pages); ++column) {
    const int32_t old = row_sidecar(row)[column];
    set_sidecar(row, column, static_cast<int32_t>(pages[column]));
    if (old) drop_c128(old);
  }
  a.c128_cols[row] = std::max(a.c128_cols[row], static_cast<int32_t>(pages.size()));
}

Pages Ledger::take_over(int64_t row, int64_t columns) {
  check_open(row);
  const int64_t first = a.shared_cols[row], limit = a.committed[row] / z.page;
  if (columns < first || columns > limit)
    fail(ErrorKind::Ownership, message("row ", row, ": take over ", columns, " columns: ", first,
                                       " (shared already) to ", limit, " (wholly committed) is allowed"));
  check_whole(row);
  step();
  const int32_t *pages = row_pages(row), *sidecar = row_sidecar(row);
  Pages out;
  out.full.assign(pages + first, pages + columns);
  for (const int32_t page : out.full) {
    a.page_state[FULL][page] = OUTSIDE;
    a.full_owner[page] = 0;
    ++a.full_readers[page];
  }
  if (!full_only())
    out.c128.assign(sidecar + first * z.page / z.group_tokens, sidecar + columns * z.page / z.group_tokens);
  for (const int32_t page : out.c128) ++a.c128_count[page];
  a.shared_cols[row] = static_cast<int32_t>(columns);
  return out;
}

void Ledger::trim(int64_t row, int64_t boundary) {
  check_open(row);
  const int64_t low = a.shared_cols[row] * z.page, high = a.allocated[row];
  if (boundary < low || boundary > high)
    fail(ErrorKind::Ownership, message("row ", row, ": trim to ", boundary, ": ", low, " (shared prefix) to ", high,
                                       " (allocated) is allowed"));
  step();
  const int64_t keep = ceil_div(boundary, z.page), held = a.held_cols[row];
  for_each_page(row_pages(row) + keep, std::max<int64_t>(0, held - keep), [&](int64_t column, int32_t page) {
    set_column(row, keep + column, 0);
    free_full(page);
  });
  const int64_t side = sidecar_for(boundary), filled = a.c128_cols[row];
  for_each_page(row_sidecar(row) + side, std::max<int64_t>(0, filled - side), [&](int64_t column, int32_t page) {
    set_sidecar(row, side + column, 0);
    drop_c128(page);
  });
  a.c128_cols[row] = static_cast<int32_t>(std::min(filled, side));
  a.held_cols[row] = static_cast<int32_t>(std::min(held, keep));
  a.allocated[row] = std::min(high, keep * z.page);
  a.committed[row] = std::min(a.committed[row], boundary);
  a.evict_cursor[row] = std::min(a.evict_cursor[row], static_cast<int32_t>(keep));
  a.swa_start[row] = std::min(a.swa_start[row], static_cast<int32_t>(keep));
  if (!readable(row, a.committed[row])) a.flags[row] |= GAP;
}

int64_t Ledger::evict(int64_t row, int64_t width) {
  check_open(row);
  const int64_t bound = floor_div(a.committed[row] - std::max(z.window, width), z.page);
  if (bound <= a.evict_cursor[row] || full_only()) return 0;
  step();
  int64_t freed = 0;
  for (int64_t column = std::max(a.evict_cursor[row], a.shared_cols[row]); column < bound; ++column)
    if (const int32_t page = row_pages(row)[column]) freed += unmap(page) != 0;
  a.evict_cursor[row] = static_cast<int32_t>(bound);
  a.swa_start[row] = std::max(a.swa_start[row], static_cast<int32_t>(bound));
  return freed;
}

std::vector<int64_t> Ledger::slot_pages(Ids slots) const {
  const int64_t limit = (a.total[FULL] + 1) * z.page;
  for (const int64_t slot : slots)
    if (slot < z.page || slot >= limit)
      fail(ErrorKind::Input, message("FULL slot ", slot, ": ", z.page, " to ", limit - 1, " is allowed"));
  std::vector<bool> seen(a.total[FULL] + 1);
  std::vector<int64_t> pages;
  for (const int64_t slot : slots) {
    const int64_t page = slot / z.page;
    if (!seen[page]) pages.push_back(page);
    seen[page] = true;
  }
  return pages;
}

void Ledger::free_slots(Ids slots) {
  const std::vector<int64_t> pages = slot_pages(slots);
  for (const int64_t page : pages) {
    if (a.page_state[FULL][page] == HELD) continue;
    check_outside(page);
    check_unread(page);
  }
  step();
  for (const int64_t page : pages) {
    if (const int32_t row = a.full_owner[page]) {
      for (int64_t column = 0; column < z.columns; ++column)
        if (row_pages(row)[column] == page) set_column(row, column, 0);
      a.flags[row] |= HOLES;
    }
    free_full(page);
  }
}

void Ledger::free_swa_slots(Ids slots) {
  const std::vector<int64_t> pages = slot_pages(slots);
  for (const int64_t page : pages)
    if (a.page_state[FULL][page] != HELD) check_outside(page);
  step();
  for (const int64_t page : pages) {
    const int32_t row = a.full_owner[page];
    if (row && swa_of(page)) {
      const auto column = std::find(row_pages(row), row_pages(row) + z.columns, page) - row_pages(row);
      a.swa_start[row] = std::max(a.swa_start[row], static_cast<int32_t>(column + 1));
      a.flags[row] |= GAP;
    }
    unmap(page);
  }
}

}  // namespace dsv4
