// Capacity: plan and write an extension, reserve a decode step, turn positions into slots.
#include <algorithm>

#include "ledger.h"

namespace dsv4 {

int64_t Ledger::decode_len(int64_t row, int64_t reserve) const {
  return std::max(a.allocated[row], ceil_to(a.committed[row] + reserve, z.page));
}

// First column that the extension must leave with an SWA page.
int64_t Ledger::swa_from(int64_t row, int64_t new_len, int64_t tail) const {
  const int64_t old = a.allocated[row];
  if (new_len <= old || tail == 0) return std::max<int64_t>(ceil_div(new_len, z.page), a.held_cols[row]);
  if (tail == kNoTail) return old / z.page;
  return std::max(old / z.page, std::max<int64_t>(0, new_len - tail) / z.page);
}

// Whether the partly filled last page lacks an SWA page that the extension writes to.
bool Ledger::remap(int64_t row, int64_t first) const {
  const int64_t held = a.held_cols[row];
  if (first >= held || held == 0 || full_only()) return false;
  const int32_t last = row_pages(row)[held - 1];
  return a.full_owner[last] == row && swa_of(last) == 0;
}

Need Ledger::need_of(int64_t row, int64_t new_len, int64_t tail) const {
  const int64_t held = a.held_cols[row];
  const int64_t columns = std::max(held, ceil_div(new_len, z.page));
  if (full_only()) return {columns - held, 0, 0};
  const int64_t first = swa_from(row, new_len, tail);
  return {columns - held, std::max<int64_t>(0, columns - std::max(first, held)) + remap(row, first),
          std::max<int64_t>(0, c128_columns(new_len, z.c128_page) - a.c128_cols[row])};
}

template <class NextFull, class NextSwa, class NextC128>
void Ledger::write_row(int64_t row, int64_t new_len, int64_t tail, const Need& need, NextFull&& next_full,
                       NextSwa&& next_swa, NextC128&& next_c128) {
  const int64_t held = a.held_cols[row], columns = held + need.full;
  const int64_t first = swa_from(row, new_len, tail);
  if (remap(row, first)) {
    map(row_pages(row)[held - 1], next_swa());
    if (a.swa_start[row] == held) a.swa_start[row] = static_cast<int32_t>(held - 1);
  }
  for (int64_t column = held; column < columns; ++column) {
    const int32_t page = next_full();
    set_column(row, column, page);
    a.page_state[FULL][page] = HELD;
    a.full_owner[page] = static_cast<int32_t>(row);
    if (column >= first && !full_only()) map(page, next_swa());
  }
  if (first > held && !full_only()) {
    a.swa_start[row] = static_cast<int32_t>(first);
    a.flags[row] |= GAP;
  }
  const int64_t side = a.c128_cols[row];
  for (int64_t column = side; column < side + need.c128; ++column) {
    const int32_t page = next_c128();
    set_sidecar(row, column, page);
    a.page_state[C128][page] = HELD;
    a.c128_count[page] = 1;
  }
  a.c128_cols[row] = static_cast<int32_t>(side + need.c128);
  a.held_cols[row] = static_cast<int32_t>(columns);
  a.allocated[row] = std::max(a.allocated[row], new_len);
}

Need Ledger::plan(Ids rows, Ids new_lens, Ids tails) const {
  Need sum;
  for (size_t i = 0; i < rows.size(); ++i) {
    check_extend(rows[i], new_lens[i]);
    const Need need = need_of(rows[i], std::max(new_lens[i], a.allocated[rows[i]]), tails[i]);
    sum.full += need.full;
    sum.swa += need.swa;
    sum.c128 += need.c128;
  }
  return sum;
}

void Ledger::write(Ids rows, Ids old_lens, Ids new_lens, Ids tails, Ids32 full, Ids32 swa, Ids32 c128) {
  for (size_t i = 0; i < rows.size(); ++i) {
    check_open(rows[i]);
    if (a.allocated[rows[i]] != old_lens[i])
      fail(ErrorKind::Ownership, message("row ", rows[i], ": allocated changed from ", old_lens[i], " to ",
                                         a.allocated[rows[i]], " since it was planned"));
  }
  const Need need = plan(rows, new_lens, tails);
  if (!(need == Need{std::ssize(full), std::ssize(swa), std::ssize(c128)}))
    fail(ErrorKind::Ownership, message("the rows changed since they were planned: need (", need.full, ", ", need.swa,
                                       ", ", need.c128, ") pages now"));
  check_taken(FULL, full);
  check_taken(SWA, swa);
  check_taken(C128, c128);
  step();
  auto f = full.begin();
  auto s = swa.begin();
  auto c = c128.begin();
  for (size_t i = 0; i < rows.size(); ++i)
    write_row(
        rows[i], new_lens[i], tails[i], need_of(rows[i], new_lens[i], tails[i]), [&] { return *f++; },
        [&] { return *s++; }, [&] { return *c++; });
}

void Ledger::decode_step(Ids rows, int64_t reserve, int64_t width) {
  if (width < 0 || width > reserve)
    fail(ErrorKind::Input, message("width = ", width, ": 0 to reserve = ", reserve, " is allowed"));
  Need sum;
  bool growing = false;
  for (const int64_t row : rows) {
    if (row == 0) continue;
    check_open(row);
    check_whole(row);
    check_window(row, a.committed[row], "decode");
    const int64_t length = decode_len(row, reserve);
    check_width(row, length);
    if (length == a.allocated[row] && sidecar_for(length) <= a.c128_cols[row]) continue;
    const Need need = need_of(row, length, kNoTail);
    sum.full += need.full;
    sum.swa += need.swa;
    sum.c128 += need.c128;
    growing = true;
  }
  if (!growing) return;
  check_room(sum);
  step();
  for (const int64_t row : rows) {
    if (row == 0) continue;
    const int64_t length = decode_len(row, reserve);
    write_row(
        row, length, kNoTail, need_of(row, length, kNoTail), [&] { return pop(FULL, HELD); },
        [&] { return pop(SWA, HELD); }, [&] { return pop(C128, HELD); });
  }
  for (int family = FULL; family <= C128; ++family) note_peak(family);
}

void Ledger::check_span(int64_t row, int64_t start, int64_t stop) const {
  check_open(row);
  const int64_t limit = a.allocated[row];
  if (start < 0 || start > stop || stop > limit)
    fail(ErrorKind::Input, message("row ", row, ": positions [", start, ", ", stop, "): within 0 to ", limit,
                                   " (allocated) is allowed"));
  if (start < stop)
    for (int64_t column = start / z.page; column <= (stop - 1) / z.page; ++column)
      if (!row_pages(row)[column])
        fail(ErrorKind::Ownership, message("row ", row, ": FULL column ", column, " is empty"));
  if (start / kC128Ratio < stop / kC128Ratio && !full_only())
    for (int64_t column = start / z.group_tokens; column <= (stop / kC128Ratio - 1) / z.c128_page; ++column)
      if (!row_sidecar(row)[column])
        fail(ErrorKind::Ownership, message("row ", row, ": C128 column ", column, " is empty"));
}

void Ledger::count_slots(int64_t row, int64_t start, int64_t stop, SlotCounts& counts) const {
  counts.full += stop - start;
  if (row == 0 || full_only()) return;
  counts.c4 += stop / kC4Ratio - start / kC4Ratio;
  counts.c128 += stop / kC128Ratio - start / kC128Ratio;
}

void Ledger::fill_slots(int64_t row, int64_t start, int64_t stop, SlotCursor& out) const {
  if (row == 0) {
    out.full = std::fill_n(out.full, stop - start, 0);
    out.swa = std::fill_n(out.swa, stop - start, 0);
    return;
  }
  const int32_t* pages = row_pages(row);
  for (int64_t position = start; position < stop;) {
    const int64_t column = position / z.page, offset = position - column * z.page;
    const int64_t count = std::min(z.page - offset, stop - position);
    const int64_t full = pages[column] * z.page + offset;
    const int64_t page = swa_of(pages[column]);
    for (int64_t i = 0; i < count; ++i) out.full[i] = full + i;
    if (page) {
      const int64_t swa = page * z.page + offset;
      for (int64_t i = 0; i < count; ++i) out.swa[i] = swa + i;
    } else {
      std::fill_n(out.swa, count, 0);
    }
    out.full += count;
    out.swa += count;
    position += count;
    if (full_only()) continue;
    // Pages are multiples of four, so a slot closes a C4 window exactly where its position does.
    for (int64_t slot = full / kC4Ratio; slot < (full + count) / kC4Ratio; ++slot) *out.c4++ = slot;
  }
  if (full_only()) return;
  const int32_t* sidecar = row_sidecar(row);
  for (int64_t entry = start / kC128Ratio; entry < stop / kC128Ratio; ++entry)
    *out.c128++ = sidecar[entry / z.c128_page] * z.c128_page + entry % z.c128_page;
}

}  // namespace dsv4
