// A rank's program of one step: messages and waits happen here, all else in the handlers of runtime/executor.py.
#pragma once
#include "messages.h"

// What the executor and this share, by index; see Executor._share_with_native.
enum Shared { MESSAGES, PARAMS, RECEIVES, GRAD_SUMS, EMPTY_SUMS, PULLED_AHEAD, OWNER, RELEASED, COMPLETE, HANDLERS };

class Program {
   public:
    // slots, corrected: copies of versions and of their corrections; predicts: the corrections are predictions.
    Program(std::vector<Action> held, int64_t begin, int64_t end, int64_t per_round, int64_t repeats, int slots, int corrected,
            bool predicts)
        : held_(std::move(held)), begin_(begin), end_(end), per_round_(per_round), repeats_(repeats), slots_(slots),
          corrected_(corrected), predicts_(predicts) {}

    int64_t cursor = 0;  // the next action, after an error

    const Action& at(int64_t index) const {  // as plan.program.Program
        if (repeats_ && index >= end_) index -= std::min((index - begin_) / (end_ - begin_), repeats_) * 2 * per_round_;
        return held_[index];
    }

    const std::vector<Action>& held() const { return held_; }

    // Execute from ``begin`` to ``end``, if that is behind it. Returns where it ended; an error leaves that in ``cursor``.
    int64_t run(int64_t begin, int64_t end, py::tuple shared) {
        cursor = begin;
        Messages& m = py::cast<Messages&>(py::object(shared[MESSAGES]));
        int64_t step = m.step();
        Links& links = *m.links;
        links.raise_failure();
        u64 current = links.current();
        links.work_enqueued();
        Flushed flushed{links.driver};
        for (; cursor < end; ++cursor) {
            const Action& a = at(cursor);
            switch (a.does) {
                case Does::PULL:
                    if (a.backward && PySet_GET_SIZE(shared[PULLED_AHEAD].ptr())) {
                        call(m, a, shared);
                        break;
                    }
                    [[fallthrough]];
                case Does::POSTS: m.post_all(a, false, current, step); break;
                case Does::RELAYED_POSTS: m.post_all(a, true, current, step); break;
                case Does::PUBLISH:
                    if (a.relayed)
                        m.offer(a, nullptr, step);
                    else
                        m.push(a, nullptr, links.owner, step);
                    break;
                case Does::OFFER:
                    if (a.source == links.rank)
                        m.offer(a, held(shared[OWNER].attr("added_at")[py::int_(a.unit)]), step);
                    else
                        m.offer(a, m.back(step + a.version, a.unit, a.source, a.source_odd, a.nbytes), step);
                    break;
                case Does::WAIT_PARAM: {
                    py::int_ unit(a.unit);
                    py::dict params = shared[PARAMS];
                    if (a.backward && params.contains(unit)) break;  // kept since the forward
                    Held ticket = m.wait(a, current, step);
                    shared[RECEIVES][unit] = ticket ? py::object(py::bool_(true)) : py::object(py::none());
                    const Spot& spot = a.spot[step & 1];
                    if (!ticket) wait_published(m, a, shared[OWNER], spot, current, step);
                    params[unit] = spot.view;
                    break;
                }
                case Does::RELEASE_PARAM: {
                    py::int_ unit(a.unit);
                    if (remove(shared[PARAMS], unit)) {
                        links.driver.flush();
                        shared[RELEASED](unit);
                    }
                    py::object received = remove(shared[RECEIVES], unit);
                    if ((!received || received.is_none()) && (a.backward || a.unit < 0))
                        shared[OWNER].attr("own_read_end") = links.record(current);
                    m.post_all(a, false, current, step);
                    break;
                }
                case Does::RECV_GRAD: {
                    py::int_ unit(a.unit);
                    const Spot& spot = a.spot[step & 1];
                    bool starts = a.first && py::cast<int>(m.state.attr("rank")) == 0;
                    if (starts || m.of_sums(spot)) m.wait_readers(a, spot.region, spot.offset, a.nbytes, current);
                    if (a.source >= 0)
                        links.wait(*m.back(step, a.unit, a.source, a.source_odd, a.nbytes), m.place_of(a), current);
                    else
                        m.wait(a, current, step);
                    if (starts) py::set(shared[EMPTY_SUMS]).add(unit);
                    shared[GRAD_SUMS][unit] = spot.view;
                    break;
                }
                case Does::SEND_GRAD: {
                    py::int_ unit(a.unit);
                    if (py::object view = remove(shared[GRAD_SUMS], unit)) {
                        links.driver.flush();
                        py::set empty = shared[EMPTY_SUMS];
                        shared[COMPLETE](unit, view, empty.contains(unit));
                        PySet_Discard(empty.ptr(), unit.ptr());
                        links.work_enqueued();
                    }
                    if (a.peer >= 0) {
                        m.push(a, nullptr, current, step);
                        break;
                    }
                    py::object added = py::cast(links.record(current));
                    shared[OWNER].attr("added_at")[unit] = added;
                    if (m.last) shared[OWNER].attr("sum_ends")[unit] = added;
                    break;
                }
                case Does::PREDICT: {
                    if (step + a.version == 0) break;
                    const Spot& spot = a.spot[step & 1];
                    std::vector<Held> readers = m.reads->take(spot.region, spot.offset, a.nbytes);
                    if (a.sum.region < 0) break;
                    py::object owner = shared[OWNER];
                    auto wait = [&](const Held& ticket) {
                        if (ticket) links.wait(*ticket, m.place_of(a), links.relay);
                    };
                    wait(m.coming_back(step + a.version, a.unit, a.source_odd));
                    wait(held(get(owner.attr("added_at"), py::int_(a.unit))));
                    wait(written(owner, "published_at", a.unit, step + a.version, slots_));
                    wait(held(owner.attr("own_read_end")));
                    for (const Held& ticket : readers) wait(ticket);
                    links.driver.flush();
                    owner.attr("predict_after")(a.action);
                    break;
                }
                case Does::REDUCE: {
                    py::object owner = shared[OWNER];
                    m.wait_readers(a, a.sum, links.owner);
                    links.wait(*m.back(step + a.version, a.unit, a.source, a.source_odd, a.sum.nbytes), m.place_of(a), links.owner);
                    if (py::cast<bool>(owner.attr("eager"))) {
                        for (const Bytes& b : a.overwritten[(step + a.version + 1) % slots_]) m.wait_readers(a, b, links.owner);
                        if (Held read = held(owner.attr("own_read_end"))) links.wait_event(*read, links.owner);
                    }
                    links.driver.flush();
                    owner.attr("reduce_after_waits")(a.action);
                    break;
                }
                default: call(m, a, shared);
            }
        }
        links.driver.flush();
        return cursor;
    }

   private:
    struct Flushed {  // after an error, too: peers may wait for what came before it
        Driver& driver;
        ~Flushed() {
            try {
                driver.flush();
            } catch (const std::runtime_error&) {  // the error under way says more
            }
        }
    };

    static py::object get(const py::object& dict, const py::object& key) {  // None if it is not there
        PyObject* value = PyDict_GetItem(dict.ptr(), key.ptr());
        return value ? py::reinterpret_borrow<py::object>(value) : py::none();
    }

    static py::object remove(py::object dict, const py::object& key) {  // null if it is not there
        py::object value = py::reinterpret_borrow<py::object>(PyDict_GetItem(dict.ptr(), key.ptr()));
        if (value) PyDict_DelItem(dict.ptr(), key.ptr());
        return value;
    }

    static Held held(py::object ticket) { return ticket.is_none() ? nullptr : py::cast<Held>(ticket); }

    // The event behind the owner's last write of a unit's version, in a dict of OwnerExecutor.
    static Held written(const py::object& owner, const char* events, int unit, int64_t version, int copies) {
        int64_t copy = (version + 2 * copies) % copies;  // version -1 is possible
        return held(get(owner.attr(events), py::make_tuple(unit, copy)));
    }

    void wait_published(Messages& m, const Action& a, py::object owner, const Spot& spot, u64 current, int64_t step) {
        bool predicted = predicts_ && m.of_corrections(spot);
        const char* events = predicted ? "predicted_at" : "published_at";
        if (Held ticket = written(owner, events, a.unit, step + a.version, predicted ? corrected_ : slots_))
            m.links->wait_event(*ticket, current);
    }

    void call(Messages& m, const Action& a, py::tuple& shared) {
        m.links->driver.flush();
        shared[HANDLERS][a.action.attr("kind")](a.action);
    }

    std::vector<Action> held_;
    int64_t begin_, end_, per_round_, repeats_;
    int slots_, corrected_;
    bool predicts_;
};
