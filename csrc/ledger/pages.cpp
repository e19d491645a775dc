// Page families: free lists, quarantine, the full-to-SWA mapping, C128 reference counts.
#include "ledger.h"

namespace dsv4 {

Pages Ledger::take(const Need& need) {
  check_room(need);
  step();
  Pages out;
  const int64_t counts[] = {need.full, need.swa, need.c128};
  std::vector<int32_t>* const groups[] = {&out.full, &out.swa, &out.c128};
  for (int family = FULL; family <= C128; ++family) {
    groups[family]->reserve(counts[family]);
    for (int64_t i = 0; i < counts[family]; ++i) groups[family]->push_back(pop(family, TAKEN));
    note_peak(family);
  }
  return out;
}

void Ledger::untake(Ids32 full, Ids32 swa, Ids32 c128) {
  const Ids32 groups[] = {full, swa, c128};
  for (int family = FULL; family <= C128; ++family) check_taken(family, groups[family]);
  step();
  for (int family = FULL; family <= C128; ++family)
    for (size_t i = groups[family].size(); i-- > 0;) push(family, groups[family][i]);
}

void Ledger::drain(int64_t horizon) {
  step();
  for (int family = FULL; family <= ROW; ++family) {
    int64_t &head = counter(Q_HEAD + family), &left = counter(Q_LEN + family);
    while (left > 0 && a.q_tag[family][head] < horizon) {
      push(family, a.q_page[family][head]);
      head = head + 1 == a.total[family] ? 0 : head + 1;
      --left;
    }
  }
}

void Ledger::free_pages(Ids pages) {
  std::vector<bool> seen(a.total[FULL] + 1);
  for (const int64_t page : pages) {
    check_outside(page);
    check_unread(page);
    if (seen[page])
      fail(ErrorKind::Ownership, message("FULL page ", page, " appears twice in one call: each page is freed once"));
    seen[page] = true;
  }
  step();
  for (const int64_t page : pages) free_full(page);
}

void Ledger::free_swa(Ids pages) {
  for (const int64_t page : pages) check_outside(page);
  step();
  for (const int64_t page : pages) unmap(page);
}

void Ledger::retain(Ids pages) {
  for (const int64_t page : pages) check_counted(page);
  step();
  for (const int64_t page : pages) ++a.c128_count[page];
}

void Ledger::release(Ids pages) {
  // A trial run finds pages that are released more often than they are held, also within one call.
  size_t tried = 0;
  for (; tried < pages.size(); ++tried) {
    const int64_t page = pages[tried];
    if (page < 1 || page > a.total[C128] || a.c128_count[page] < 1) break;
    --a.c128_count[page];
  }
  for (size_t i = 0; i < tried; ++i) ++a.c128_count[pages[i]];
  if (tried < pages.size()) {
    check_counted(pages[tried]);
    fail(ErrorKind::Ownership, message("C128 page ", pages[tried], " has count ", a.c128_count[pages[tried]],
                                       " and is released more often in one call"));
  }
  step();
  for (const int64_t page : pages) drop_c128(static_cast<int32_t>(page));
}

int64_t Ledger::collect(std::span<int64_t> index, std::span<int64_t> value) {
  const int64_t count = counter(N_DIRTY);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t where = a.dirty_list[i];
    index[i] = where;
    value[i] = a.tables[where];
    a.dirty[where] = 0;
  }
  counter(N_DIRTY) = 0;
  return count;
}

std::vector<int32_t> Ledger::drain_swa_log() {
  std::vector<int32_t> pages(a.swa_log, a.swa_log + counter(N_SWA_LOG));
  for (const int32_t page : pages) a.swa_logged[page] = 0;
  counter(N_SWA_LOG) = 0;
  return pages;
}

void Ledger::check_room(const Need& need) const {
  const int64_t counts[] = {need.full, need.swa, need.c128};
  for (int family = FULL; family <= C128; ++family)
    if (counts[family] > free_count(family))
      fail(ErrorKind::Capacity, message(kFamilyNames[family], " pages: need ", counts[family], ", free ",
                                        free_count(family), " of ", a.total[family], ", waiting for an epoch ",
                                        counter(Q_LEN + family)));
}

void Ledger::check_taken(int family, Ids32 pages) const {
  for (const int32_t page : pages)
    if (page < 1 || page > a.total[family] || a.page_state[family][page] != TAKEN)
      fail(ErrorKind::Ownership, message(kFamilyNames[family], " page ", page, " is not taken by a transaction"));
}

void Ledger::check_outside(int64_t page) const {
  if (page < 1 || page > a.total[FULL])
    fail(ErrorKind::Input, message("FULL page ", page, ": 1 to ", a.total[FULL], " is allowed"));
  const uint8_t found = a.page_state[FULL][page];
  if (found != OUTSIDE)
    fail(ErrorKind::Ownership,
         message("FULL page ", page, " is ", kStateNames[found], ": it must be held outside of the rows"));
}

void Ledger::check_unread(int64_t page) const {
  if (a.full_readers[page])
    fail(ErrorKind::Ownership, message("FULL page ", page, " is read as a shared prefix by ", a.full_readers[page],
                                       " rows: it can be freed only when no row reads it"));
}

void Ledger::check_counted(int64_t page) const {
  if (page < 1 || page > a.total[C128])
    fail(ErrorKind::Input, message("C128 page ", page, ": 1 to ", a.total[C128], " is allowed"));
  if (a.c128_count[page] < 1)
    fail(ErrorKind::Ownership, message("C128 page ", page, " has count 0 and is ",
                                       kStateNames[a.page_state[C128][page]], ": nobody holds it"));
}

void Ledger::mark(int64_t index) const {
  if (a.dirty[index]) return;
  a.dirty[index] = 1;
  a.dirty_list[counter(N_DIRTY)++] = index;
}

int32_t Ledger::pop(int family, PageState state) const {
  const int32_t page = a.free_list[family][--counter(N_FREE + family)];
  a.page_state[family][page] = state;
  return page;
}

void Ledger::note_peak(int family) const {
  const int64_t used = a.total[family] - free_count(family);
  if (used > counter(PEAK + family)) counter(PEAK + family) = used;
}

void Ledger::push(int family, int32_t page) const {
  a.free_list[family][counter(N_FREE + family)++] = page;
  a.page_state[family][page] = FREE;
}

void Ledger::put(int family, int32_t page) const {
  const int64_t tag = counter(TAG);
  if (!tag) {
    push(family, page);
    return;
  }
  int64_t where = counter(Q_HEAD + family) + counter(Q_LEN + family)++;
  if (where >= a.total[family]) where -= a.total[family];
  a.q_page[family][where] = page;
  a.q_tag[family][where] = tag;
  a.page_state[family][page] = QUARANTINED;
}

void Ledger::map(int64_t full, int32_t swa) const {
  swa_of(full) = swa;
  a.swa_full[swa] = static_cast<int32_t>(full);
  a.page_state[SWA][swa] = HELD;
  mark(a.swa_base + full);
}

int32_t Ledger::unmap(int64_t full) const {
  const int32_t swa = swa_of(full);
  if (!swa) return 0;
  swa_of(full) = 0;
  a.swa_full[swa] = 0;
  mark(a.swa_base + full);
  if (!a.swa_logged[swa]) {
    a.swa_logged[swa] = 1;
    a.swa_log[counter(N_SWA_LOG)++] = swa;
  }
  put(SWA, swa);
  return swa;
}

int32_t Ledger::free_full(int64_t page) const {
  const int32_t swa = unmap(page);
  a.full_owner[page] = 0;
  put(FULL, static_cast<int32_t>(page));
  return swa;
}

void Ledger::drop_c128(int32_t page) const {
  if (--a.c128_count[page] == 0) put(C128, page);
}

}  // namespace dsv4
