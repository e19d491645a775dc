// Python binding of the ledger: dsv4_npu._ledger. Takes and returns numpy arrays; needs no libtorch.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>

#include "ledger.h"

namespace py = pybind11;

namespace {

using dsv4::Ids;
using dsv4::Ids32;
using dsv4::Need;
using In64 = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
using In32 = py::array_t<int32_t, py::array::c_style | py::array::forcecast>;

Ids ids(const In64& array) { return {array.data(), static_cast<size_t>(array.size())}; }
Ids32 ids(const In32& array) { return {array.data(), static_cast<size_t>(array.size())}; }

py::array_t<int32_t> to_numpy(const std::vector<int32_t>& pages) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(pages.size()), pages.data());
}

template <class T>
T* data_of(const py::handle& array, int64_t length) {
  const auto typed = py::array_t<T, py::array::c_style>::ensure(array);
  // A copy would be updated in the caller's stead.
  if (!typed || typed.ptr() != array.ptr()) throw py::type_error("the state's arrays must be contiguous and typed");
  if (typed.size() != length) throw py::value_error("an array of the state has a wrong length");
  return const_cast<T*>(typed.data());
}

class PyLedger {
 public:
  explicit PyLedger(py::object state) : state_(std::move(state)), core_(sizes(), arrays()) {}

  void bind() { core_.a = arrays(); }

  py::tuple take(int64_t full, int64_t swa, int64_t c128) {
    const dsv4::Pages pages = core_.take({full, swa, c128});
    return py::make_tuple(to_numpy(pages.full), to_numpy(pages.swa), to_numpy(pages.c128));
  }
  void untake(const In32& full, const In32& swa, const In32& c128) { core_.untake(ids(full), ids(swa), ids(c128)); }
  void set_tag(int64_t epoch) { core_.a.counters[dsv4::TAG] = epoch; }

  py::tuple plan(const In64& rows, const In64& lens, const In64& tails) {
    same_length({rows.size(), lens.size(), tails.size()});
    const Need need = core_.plan(ids(rows), ids(lens), ids(tails));
    return py::make_tuple(need.full, need.swa, need.c128);
  }

  py::tuple write(const In64& rows, const In64& old_lens, const In64& new_lens, const In64& tails, const In32& full,
                  const In32& swa, const In32& c128, bool want) {
    same_length({rows.size(), old_lens.size(), new_lens.size(), tails.size()});
    core_.write(ids(rows), ids(old_lens), ids(new_lens), ids(tails), ids(full), ids(swa), ids(c128));
    const Ids row = ids(rows), start = ids(old_lens), stop = ids(new_lens);
    return slots_of(want ? row.size() : 0, [&](size_t i, auto&& use) {
      use(row[i], start[i], std::max(start[i], stop[i]));
    });
  }

  py::tuple decode_step(const In64& rows, int64_t reserve, int64_t width) {
    core_.decode_step(ids(rows), reserve, width);
    const Ids row = ids(rows);
    return slots_of(row.size(), [&](size_t i, auto&& use) {
      const int64_t start = core_.a.committed[row[i]];
      use(row[i], start, start + width);
    });
  }

  py::tuple window(const In64& rows, const In64& starts, int64_t width) {
    same_length({rows.size(), starts.size()});
    const Ids row = ids(rows), start = ids(starts);
    for (size_t i = 0; i < row.size(); ++i)
      if (row[i]) core_.check_span(row[i], start[i], start[i] + width);
    return slots_of(row.size(), [&](size_t i, auto&& use) { use(row[i], start[i], start[i] + width); });
  }

  py::tuple slots(int64_t row, int64_t start, int64_t stop) {
    core_.check_span(row, start, stop);
    return slots_of(1, [&](size_t, auto&& use) { use(row, start, stop); });
  }

  void commit(const In64& rows, const In64& lens) {
    same_length({rows.size(), lens.size()});
    core_.commit(ids(rows), ids(lens));
  }
  void attach(int64_t row, const In64& pages, const In64& c128, int64_t length) {
    core_.attach(row, ids(pages), ids(c128), length);
  }
  py::tuple take_over(int64_t row, int64_t columns) {
    const dsv4::Pages pages = core_.take_over(row, columns);
    return py::make_tuple(to_numpy(pages.full), to_numpy(pages.c128));
  }
  py::array_t<int32_t> close(int64_t row) { return to_numpy(core_.close(row)); }
  py::array_t<int32_t> drain_swa_log() { return to_numpy(core_.drain_swa_log()); }

  int64_t collect(py::array_t<int64_t, py::array::c_style> index, py::array_t<int64_t, py::array::c_style> value) {
    const int64_t count = core_.a.counters[dsv4::N_DIRTY];
    if (index.size() < count || value.size() < count) throw py::value_error("the staging arrays are too short");
    return core_.collect({index.mutable_data(), static_cast<size_t>(count)},
                         {value.mutable_data(), static_cast<size_t>(count)});
  }

  dsv4::Ledger& core() { return core_; }

 private:
  static void same_length(std::initializer_list<py::ssize_t> lengths) {
    for (const py::ssize_t length : lengths)
      if (length != *lengths.begin()) throw py::value_error("rows and lengths differ in number");
  }

  // visit(i, use) calls use(row, start, stop) for the i-th range; ranges were checked.
  template <class Visit>
  py::tuple slots_of(size_t count, Visit&& visit) {
    dsv4::SlotCounts sum;
    for (size_t i = 0; i < count; ++i)
      visit(i, [&](int64_t row, int64_t start, int64_t stop) { core_.count_slots(row, start, stop, sum); });
    py::array_t<int64_t> full(sum.full), swa(sum.full), c4(sum.c4), c128(sum.c128);
    dsv4::SlotCursor out{full.mutable_data(), swa.mutable_data(), c4.mutable_data(), c128.mutable_data()};
    for (size_t i = 0; i < count; ++i)
      visit(i, [&](int64_t row, int64_t start, int64_t stop) { core_.fill_slots(row, start, stop, out); });
    return py::make_tuple(std::move(full), std::move(swa), std::move(c4), std::move(c128));
  }

  dsv4::Sizes sizes() const {
    const py::object spec = state_.attr("spec");
    const auto get = [&](const char* name) { return spec.attr(name).cast<int64_t>(); };
    return {get("page_size"), get("c128_page_size"),  get("window"),      get("row_width"),
            get("columns"),   get("sidecar_columns"), get("group_tokens")};
  }

  dsv4::Arrays arrays() const {
    dsv4::Arrays a{};
    const py::object spec = state_.attr("spec");
    const int64_t rows = spec.attr("request_rows").cast<int64_t>() + 1;
    const int64_t entries = spec.attr("table_entries").cast<int64_t>();
    a.tables = data_of<int32_t>(state_.attr("tables"), entries);
    a.swa_base = state_.attr("swa_base").cast<int64_t>();
    a.c128_base = state_.attr("c128_base").cast<int64_t>();
    a.dirty = data_of<uint8_t>(state_.attr("dirty"), entries);
    a.dirty_list = data_of<int64_t>(state_.attr("dirty_list"), entries);
    a.counters = data_of<int64_t>(state_.attr("counters"), dsv4::N_SWA_LOG + 1);
    for (int family = dsv4::FULL; family <= dsv4::ROW; ++family) {
      const auto item = [&](const char* name) { return py::object(state_.attr(name)[py::int_(family)]); };
      const int64_t total = py::len(item("free_list"));
      a.total[family] = total;
      a.free_list[family] = data_of<int32_t>(item("free_list"), total);
      a.page_state[family] = data_of<uint8_t>(item("page_state"), total + 1);
      a.q_page[family] = data_of<int32_t>(item("q_page"), total);
      a.q_tag[family] = data_of<int64_t>(item("q_tag"), total);
    }
    a.full_owner = data_of<int32_t>(state_.attr("full_owner"), a.total[dsv4::FULL] + 1);
    a.full_readers = data_of<int32_t>(state_.attr("full_readers"), a.total[dsv4::FULL] + 1);
    a.swa_full = data_of<int32_t>(state_.attr("swa_full"), a.total[dsv4::SWA] + 1);
    a.swa_log = data_of<int32_t>(state_.attr("swa_log"), a.total[dsv4::SWA]);
    a.swa_logged = data_of<uint8_t>(state_.attr("swa_logged"), a.total[dsv4::SWA] + 1);
    a.c128_count = data_of<int32_t>(state_.attr("c128_count"), a.total[dsv4::C128] + 1);
    a.committed = data_of<int64_t>(state_.attr("committed"), rows);
    a.allocated = data_of<int64_t>(state_.attr("allocated"), rows);
    a.held_cols = data_of<int32_t>(state_.attr("held_cols"), rows);
    a.c128_cols = data_of<int32_t>(state_.attr("c128_cols"), rows);
    a.shared_cols = data_of<int32_t>(state_.attr("shared_cols"), rows);
    a.evict_cursor = data_of<int32_t>(state_.attr("evict_cursor"), rows);
    a.swa_start = data_of<int32_t>(state_.attr("swa_start"), rows);
    a.flags = data_of<uint8_t>(state_.attr("flags"), rows);
    return a;
  }

  py::object state_;  // keeps the arrays alive
  dsv4::Ledger core_;
};

void set_python_error(const dsv4::Failure& failure) {
  const char* const names[] = {"InputError", "CapacityError", "OwnershipError"};
  const py::object type = py::module_::import("dsv4_npu.errors").attr(names[static_cast<int>(failure.kind)]);
  PyErr_SetString(type.ptr(), failure.text.c_str());
}

// Binds a core method whose only arguments are one row and numbers, or one list of ids.
template <class Result, class... Args>
auto row_call(Result (dsv4::Ledger::*method)(Args...)) {
  return [method](PyLedger& self, Args... args) { return (self.core().*method)(args...); };
}
auto ids_call(void (dsv4::Ledger::*method)(Ids)) {
  return [method](PyLedger& self, const In64& values) { (self.core().*method)(ids(values)); };
}

}  // namespace

PYBIND11_MODULE(_ledger, module) {
  module.doc() = "Compiled page ledger; dsv4_npu.alloc.ledger.Ledger documents every call.";
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const dsv4::Failure& failure) {
      set_python_error(failure);
    }
  });
  using dsv4::Ledger;
  py::class_<PyLedger>(module, "Ledger")
      .def(py::init<py::object>(), py::arg("state"))
      .def_property_readonly("backend", [](const PyLedger&) { return "cpp"; })
      .def("bind", &PyLedger::bind)
      .def("take", &PyLedger::take)
      .def("untake", &PyLedger::untake)
      .def("drain", row_call(&Ledger::drain))
      .def("set_tag", &PyLedger::set_tag)
      .def("open_row", row_call(&Ledger::open_row))
      .def("close", &PyLedger::close)
      .def("commit", &PyLedger::commit)
      .def("rewind", row_call(&Ledger::rewind))
      .def("plan", &PyLedger::plan)
      .def("write", &PyLedger::write)
      .def("decode_step", &PyLedger::decode_step)
      .def("window", &PyLedger::window)
      .def("slots", &PyLedger::slots)
      .def("attach", &PyLedger::attach)
      .def("replace_c128", [](PyLedger& self, int64_t row, const In64& pages) {
        self.core().replace_c128(row, ids(pages));
      })
      .def("take_over", &PyLedger::take_over)
      .def("trim", row_call(&Ledger::trim))
      .def("evict", row_call(&Ledger::evict))
      .def("free_slots", ids_call(&Ledger::free_slots))
      .def("free_swa_slots", ids_call(&Ledger::free_swa_slots))
      .def("free_pages", ids_call(&Ledger::free_pages))
      .def("free_swa", ids_call(&Ledger::free_swa))
      .def("retain_c128", ids_call(&Ledger::retain))
      .def("release_c128", ids_call(&Ledger::release))
      .def("collect", &PyLedger::collect)
      .def("drain_swa_log", &PyLedger::drain_swa_log);
}
