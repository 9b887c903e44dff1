// deepspeed_cdp's loops over messages in C++; native/load.py builds it. Classes do as those of the same name in Python.
#include "program.h"

#include <algorithm>

namespace {
using Spots = std::vector<std::tuple<int, int64_t, u64, py::object>>;

Place place(py::object where) { return {std::move(where), py::none(), 0}; }

void spots(Spot* to, const Spots& from) {
    for (int k = 0; k < STEPS && k < static_cast<int>(from.size()); ++k)
        to[k] = {std::get<0>(from[k]), std::get<1>(from[k]), std::get<2>(from[k]), std::get<3>(from[k])};
}

Post post_of(const py::tuple& t) {  // as NativeMessages._post
    Post p;
    p.stream = py::cast<int>(t[0]);
    p.src = py::cast<int>(t[1]);
    spots(p.spot, py::cast<Spots>(t[2]));
    p.nbytes = py::cast<int64_t>(t[3]);
    auto origin = py::cast<std::vector<int64_t>>(t[4]);
    std::copy(origin.begin(), origin.end(), p.origin);
    p.ahead = py::cast<int>(t[5]);
    p.odd = py::cast<bool>(t[6]);
    p.unit = py::cast<int>(t[7]);
    p.backward = py::cast<bool>(t[8]);
    return p;
}

Bytes bytes_of(py::handle t) {
    auto [region, offset, nbytes] = py::cast<std::tuple<int, int64_t, int64_t>>(t);
    return {region, offset, nbytes};
}

Does does_of(const std::string& name) {
    static const std::vector<std::string> names = {"",           "posts",        "pull",      "relayed posts", "publish",
                                                   "offer",      "wait param",   "release param", "recv grad", "send grad",
                                                   "predict",    "reduce"};
    auto at = std::find(names.begin(), names.end(), name);
    if (at == names.end()) throw std::out_of_range(name);
    return static_cast<Does>(at - names.begin());
}

Action action_of(const py::tuple& t) {  // as NativeMessages._action
    Action a;
    a.action = t[0];
    a.does = does_of(py::cast<std::string>(t[1]));
    a.stream = py::cast<int>(t[2]);
    a.peer = py::cast<int>(t[3]);
    a.unit = py::cast<int>(t[4]);
    a.odd = py::cast<bool>(t[5]);
    a.first = py::cast<bool>(t[6]);
    a.backward = py::cast<bool>(t[7]);
    a.relayed = py::cast<bool>(t[8]);
    spots(a.spot, py::cast<Spots>(t[9]));
    a.nbytes = py::cast<int64_t>(t[10]);
    a.version = py::cast<int64_t>(t[11]);
    auto into = py::cast<std::vector<int64_t>>(t[12]);
    std::copy(into.begin(), into.end(), a.into);
    a.source = py::cast<int>(t[13]);
    a.source_odd = py::cast<bool>(t[14]);
    for (py::handle p : t[15]) a.posts.push_back(post_of(py::cast<py::tuple>(p)));
    a.sum = bytes_of(t[16]);
    for (py::handle slot : t[17]) {
        a.overwritten.emplace_back();
        for (py::handle b : slot) a.overwritten.back().push_back(bytes_of(b));
    }
    return a;
}

std::vector<Held> held(const py::sequence& tickets) {
    std::vector<Held> all;
    for (py::handle t : tickets) all.push_back(py::cast<Held>(t));
    return all;
}
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
    py::class_<Ticket, Held>(m, "Ticket")
        .def("wait",
             [](Ticket& t, py::object where) {
                 t.links->look_for_timing();
                 t.links->wait(t, place(std::move(where)), t.links->current());
                 t.links->driver.flush();
             })
        .def("done", [](Ticket& t) { return !t.is_word && t.links->driver.event_done(t.at); })
        .def_readwrite("counted", &Ticket::counted)
        .def_property_readonly("event", [](Ticket& t) { return t.at; });

    py::class_<Links, std::shared_ptr<Links>>(m, "Links")
        .def(py::init<const std::string&, int, int, std::vector<std::string>, const std::vector<std::tuple<u64, bool, bool>>&,
                      std::vector<u64>, u64, u64, u64, py::object, py::object, py::object, py::dict>())
        .def_readwrite("bases", &Links::bases)
        .def_readwrite("failure", &Links::failure)
        .def("work_enqueued", &Links::work_enqueued)
        .def("record_event",
             [](Links& l) {
                 Held ticket = l.record(l.current());
                 return ticket;
             })
        .def("wait_event",
             [](Links& l, const Held& ticket) {
                 l.wait_event(*ticket, l.current());
                 l.driver.flush();
             })
        .def("post",
             [](Links& l, const std::string& stream, int src, u64 into, int64_t nbytes, py::sequence after, py::object where,
                int64_t remote_offset) {
                 Held ticket =
                     l.post(l.code(stream), src, into, nbytes, held(after), remote_offset, l.current(), place(std::move(where)));
                 l.driver.flush();
                 return ticket;
             })
        .def("push",
             [](Links& l, const std::string& stream, int dst, u64 source, int64_t nbytes, const Held& after,
                int64_t remote_offset) {
                 Held ticket = l.push(l.code(stream), dst, source, nbytes, after.get(), remote_offset, l.current());
                 l.driver.flush();
                 return ticket;
             })
        .def("count", [](Links& l, const std::string& stream, int peer, bool incoming) {
            return l.count(l.code(stream), peer, incoming);
        })
        .def("clear_counts", &Links::clear_counts)
        .def("forget_waits", &Links::forget_waits)
        .def("take_waiting", &Links::take_waiting)
        .def("noted", [](Links& l) {
            py::list all;
            const auto noted = l.noted();  // a copy: while tuples are made, another thread may get its turn
            for (const Links::Noted& n : noted) {
                const Place& p = n.place;
                all.append(py::make_tuple(n.address, n.value, l.edge(n.stream, n.peer), p.where, p.action, p.step));
            }
            return all;
        });

    py::class_<Reads, std::shared_ptr<Reads>>(m, "Reads")
        .def(py::init<std::vector<std::string>, std::vector<bool>>())
        .def("clear", &Reads::clear)
        .def("count", &Reads::count)
        .def("add", [](Reads& r, const std::string& region, int64_t offset, int64_t nbytes, Held ticket) {
            r.add(r.code(region), offset, nbytes, std::move(ticket));
        })
        .def("take", [](Reads& r, const std::string& region, int64_t offset, int64_t nbytes) {
            return r.take(r.code(region), offset, nbytes);
        });

    py::class_<Program>(m, "Program")
        .def(py::init([](const py::sequence& actions, int64_t begin, int64_t end, int64_t per_round, int64_t repeats, int slots,
                         int corrected, bool predicts) {
            std::vector<Action> all;
            for (py::handle a : actions) all.push_back(action_of(py::cast<py::tuple>(a)));
            return std::make_unique<Program>(std::move(all), begin, end, per_round, repeats, slots, corrected, predicts);
        }))
        .def_readonly("cursor", &Program::cursor)
        .def("run", &Program::run);

    auto now = [](Messages& x) { return x.links->current(); };
    py::class_<Messages>(m, "Messages")
        .def(py::init<std::shared_ptr<Links>, std::shared_ptr<Reads>, py::object, py::object, bool>())
        .def_readonly("reads", &Messages::reads)
        .def("clear", &Messages::clear)
        .def("post",
             [now](Messages& x, const py::tuple& post, py::object where, bool relayed, u64 into) {
                 x.post(post_of(post), place(std::move(where)), relayed, now(x), x.step(), into);
                 x.links->driver.flush();
             })
        .def("post_all",
             [now](Messages& x, Program& p, size_t a, bool relayed) {
                 x.post_all(p.held()[a], relayed, now(x), x.step());
                 x.links->driver.flush();
             })
        .def("offer",
             [](Messages& x, Program& p, size_t a, const Held& back) {
                 x.offer(p.held()[a], back, x.step());
                 x.links->driver.flush();
             })
        .def("push",
             [now](Messages& x, Program& p, size_t a, const Held& after) {
                 x.push(p.held()[a], after.get(), now(x), x.step());
                 x.links->driver.flush();
             })
        .def("wait",
             [now](Messages& x, Program& p, size_t a) {
                 Held ticket = x.wait(p.held()[a], now(x), x.step());
                 x.links->driver.flush();
                 return ticket;
             })
        .def("wait_ahead",
             [now](Messages& x, Program& p, size_t a) {
                 x.wait_ahead(p.held()[a], now(x), x.step());
                 x.links->driver.flush();
             })
        .def("back", &Messages::back)
        .def("coming_back", &Messages::coming_back)
        .def("wait_readers", [now](Messages& x, Program& p, size_t a, const std::string& region, int64_t offset, int64_t nbytes) {
            x.step();
            x.wait_readers(p.held()[a], x.reads->code(region), offset, nbytes, now(x));
            x.links->driver.flush();
        });
}
