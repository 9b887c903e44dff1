// transport/peer.py in C++: posts and pushes over words in memory, tickets, and which CUDA streams wait.
// All of it runs under Python's lock.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <unordered_map>

#include "driver.h"

namespace py = pybind11;

class Links;

// The name of an attribute that is read often: a lookup by text makes a new string each time.
inline py::handle interned(const char* name) { return PyUnicode_InternFromString(name); }

// One side of a message, or an event (stream -1), that CUDA streams can be made to wait for.
class Ticket {
   public:
    Ticket(std::shared_ptr<Links> links, int stream, int peer, int64_t nbytes, bool is_word, u64 at, u32 value)
        : links(std::move(links)), stream(stream), peer(peer), nbytes(nbytes), counted(nbytes < 0), is_word(is_word), at(at),
          value(value) {}
    ~Ticket();
    std::shared_ptr<Links> links;
    int stream, peer;
    int64_t nbytes;  // to count as received at the first wait; -1: not a received message
    bool counted, is_word;
    u64 at;  // a word's address, or an event
    u32 value;
};
using Held = std::shared_ptr<Ticket>;

// Where a rank was when it enqueued a wait; becomes text only for an error.
struct Place {
    py::object where;   // as the caller gave it; with an action, a function of action and step that tells it
    py::object action;  // or None
    int64_t step;
};

class Links : public std::enable_shared_from_this<Links> {
   public:
    struct Stream {
        u64 handle;  // of the CUDA stream that moves its messages
        bool pulled, credit_on_current;
    };
    struct Noted {
        u64 address;
        u32 value;
        int stream, peer;
        Place place;
    };

    Links(const std::string& library, int rank, int size, std::vector<std::string> names,
          const std::vector<std::tuple<u64, bool, bool>>& streams, std::vector<u64> words, u64 credit, u64 owner, u64 relay,
          py::object current, py::object error, py::object timing, py::dict counters)
        : driver(library), rank(rank), size(size), names(std::move(names)), credit(credit), owner(owner), relay(relay),
          words_(std::move(words)), current_(std::move(current)), error_(std::move(error)), timing_(std::move(timing)),
          sent_(counters["sent"]), sent_bytes_(counters["bytes_sent"]), received_(counters["received"]),
          received_bytes_(counters["bytes_received"]) {
        for (auto& [handle, pulled, on_current] : streams) streams_.push_back({handle, pulled, on_current});
        counts_.assign(streams_.size() * size * 2, 0);
        for (auto& name : this->names)
            for (int peer = 0; peer < size; ++peer) edges_.push_back(py::make_tuple(name, peer));
        no_edge_ = py::make_tuple("", rank);
        point_ = driver.create_event();
    }

    Driver driver;
    int rank, size;
    std::vector<std::string> names;  // of streams
    u64 credit, owner, relay;        // CUDA streams
    std::vector<u64> bases;          // by rank: address of its allocation, as mapped here
    std::string failure;

    u64 current() { return py::cast<u64>(current_()); }  // torch's current CUDA stream
    void work_enqueued() { pointed_ = false; }
    void look_for_timing() {  // whether waits are timed in this step
        static const py::handle active = interned("active");
        timed_ = py::cast<bool>(timing_.attr(active));
    }

    int code(const std::string& stream) const {
        for (size_t k = 0; k < names.size(); ++k)
            if (names[k] == stream) return static_cast<int>(k);
        throw std::out_of_range("no stream " + stream);
    }

    u64 word(int at, int stream, int peer, bool arrival) const {
        return words_[at] + 4 * ((stream * size + peer) * 2 + arrival);
    }

    u32& count(int stream, int peer, bool incoming) { return counts_[(stream * size + peer) * 2 + incoming]; }

    void raise_failure() {
        if (failure.empty()) return;
        PyErr_SetString(error_.ptr(), failure.c_str());
        throw py::error_already_set();
    }

    Held record(u64 stream) { return event(stream, -1, rank, -1); }

    Held post(int stream, int src, u64 into, int64_t nbytes, const std::vector<Held>& after, int64_t remote_offset, u64 current,
              const Place& place) {
        const Stream& s = streams_[stream];
        u32 number = ++count(stream, src, true);
        u64 handle = s.credit_on_current || current == owner ? current : s.pulled ? s.handle : credit;
        if (handle != current) follow_current(handle, current);
        for (const Held& ticket : after) enqueue(*ticket, handle);
        u64 credit_word = word(src, stream, rank, false), arrival = word(rank, stream, src, true);
        if (!s.pulled) {
            driver.write_value(handle, credit_word, number);
            return std::make_shared<Ticket>(shared_from_this(), stream, src, nbytes, true, arrival, number);
        }
        driver.wait_value(handle, arrival, number);
        driver.copy(handle, into, bases[src] + remote_offset, nbytes);
        driver.write_value(handle, credit_word, number);
        note(arrival, number, stream, src, place);
        return event(handle, stream, src, nbytes);
    }

    Held push(int stream, int dst, u64 source, int64_t nbytes, const Ticket* after, int64_t remote_offset, u64 current) {
        const Stream& s = streams_[stream];
        u32 number = ++count(stream, dst, false);
        add(sent_, stream, dst, 1);
        add(sent_bytes_, stream, dst, nbytes);
        u64 credit_word = word(rank, stream, dst, false), arrival = word(dst, stream, rank, true);
        if (s.pulled) {
            driver.write_value(current, arrival, number);
            return std::make_shared<Ticket>(shared_from_this(), stream, dst, -1, true, credit_word, number);
        }
        if (after)
            enqueue(*after, s.handle);
        else if (s.handle != current)
            follow_current(s.handle, current);
        driver.wait_value(s.handle, credit_word, number);
        driver.copy(s.handle, bases[dst] + remote_offset, source, nbytes);
        driver.write_value(s.handle, arrival, number);
        return event(s.handle, stream, dst, -1);
    }

    // Make the stream ``current`` wait for a ticket.
    void wait(Ticket& ticket, const Place& place, u64 current) {
        raise_failure();
        if (ticket.is_word) note(ticket.at, ticket.value, ticket.stream, ticket.peer, place);
        bool timed = timed_ && current != owner && current != relay && ticket.stream >= 0;
        py::object before;
        if (timed) {
            driver.flush();
            before = timing_.attr("record_event")();
        }
        enqueue(ticket, current);
        if (timed) {
            driver.flush();
            timing_.attr("record_wait")(edge(ticket.stream, ticket.peer), ticket.nbytes >= 0, before);
        }
        if (std::find(waiting_.begin(), waiting_.end(), current) == waiting_.end()) waiting_.push_back(current);
        work_enqueued();
        if (!ticket.counted) {
            ticket.counted = true;
            count_received(ticket.stream, ticket.peer, ticket.nbytes);
        }
    }

    void wait_event(const Ticket& ticket, u64 current) {
        enqueue(ticket, current);
        work_enqueued();
    }

    void count_received(int stream, int peer, int64_t nbytes) {
        add(received_, stream, peer, 1);
        add(received_bytes_, stream, peer, nbytes);
    }

    // Streams that were made to wait since the last call, for the watchdog.
    std::vector<u64> take_waiting() {
        std::vector<u64> streams;
        streams.swap(waiting_);
        return streams;
    }

    py::object edge(int stream, int peer) const { return stream < 0 ? no_edge_ : edges_[stream * size + peer]; }

    const std::deque<Noted>& noted() const { return noted_; }
    void forget_waits() { noted_.clear(); }
    void clear_counts() {
        counts_.assign(counts_.size(), 0);
        noted_.clear();
    }

    std::vector<u64> free_events;

   private:
    void follow_current(u64 handle, u64 current) {  // one event serves until the current stream gets more work
        if (!pointed_ || point_on_ != current) {
            driver.record_event(point_, current);
            pointed_ = true;
            point_on_ = current;
        }
        driver.wait_event(handle, point_);
    }

    void enqueue(const Ticket& ticket, u64 stream) {
        if (ticket.is_word)
            driver.wait_value(stream, ticket.at, ticket.value);
        else
            driver.wait_event(stream, ticket.at);
    }

    Held event(u64 cuda_stream, int stream, int peer, int64_t nbytes) {
        u64 event;
        if (free_events.empty()) {
            event = driver.create_event();
        } else {
            event = free_events.back();
            free_events.pop_back();
        }
        auto ticket = std::make_shared<Ticket>(shared_from_this(), stream, peer, nbytes, false, event, 0);
        driver.record_event(event, cuda_stream);
        return ticket;
    }

    void note(u64 address, u32 value, int stream, int peer, const Place& place) {
        if (noted_.size() == 512) noted_.pop_front();
        noted_.push_back({address, value, stream, peer, place});
    }

    void add(py::object& counter, int stream, int peer, int64_t n) {
        py::handle key = edges_[stream * size + peer];
        py::object before = py::reinterpret_steal<py::object>(PyObject_GetItem(counter.ptr(), key.ptr()));  // 0 if missing
        if (!before) throw py::error_already_set();
        py::object sum = py::int_(py::cast<int64_t>(before) + n);
        if (PyObject_SetItem(counter.ptr(), key.ptr(), sum.ptr())) throw py::error_already_set();
    }

    std::vector<u64> words_;  // by rank: address of its words, as mapped here
    py::object current_, error_, timing_;
    py::object sent_, sent_bytes_, received_, received_bytes_;
    std::vector<Stream> streams_;
    std::vector<u32> counts_;  // messages posted or pushed
    std::vector<py::object> edges_;
    py::object no_edge_;
    u64 point_, point_on_ = 0;
    bool pointed_ = false, timed_ = false;
    std::deque<Noted> noted_;  // the latest waits
    std::vector<u64> waiting_;
};

inline Ticket::~Ticket() {
    if (!is_word) links->free_events.push_back(at);
}
