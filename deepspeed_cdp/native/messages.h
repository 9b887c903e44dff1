// runtime/messages.py in C++: posts, pushes and waits of one rank, addressed as in its program, and pending reads of its buffers.
#pragma once
#include "links.h"

// Transfers and copies that still read from this rank's buffers; see runtime.messages.PendingReads.
class Reads {
   public:
    Reads(std::vector<std::string> regions, std::vector<bool> by_offset)
        : regions(std::move(regions)), by_offset_(std::move(by_offset)) {}

    std::vector<std::string> regions;  // names

    int find(const std::string& region) const {  // -1: this rank has none of that name
        for (size_t k = 0; k < regions.size(); ++k)
            if (regions[k] == region) return static_cast<int>(k);
        return -1;
    }

    int code(const std::string& region) const {
        int found = find(region);
        if (found < 0) throw std::out_of_range("no region " + region);
        return found;
    }

    void clear() { reading_.clear(); }

    size_t count() const {
        size_t n = 0;
        for (auto& [key, entries] : reading_) n += entries.size();
        return n;
    }

    void add(int region, int64_t offset, int64_t nbytes, Held ticket) {
        reading_[key(region, offset)].push_back({offset, nbytes, std::move(ticket)});
    }

    // Remove and return the tickets of pending reads of these bytes. The caller waits for them.
    std::vector<Held> take(int region, int64_t offset, int64_t nbytes) {
        std::vector<Held> found;
        auto at = reading_.find(key(region, offset));
        if (at == reading_.end() || at->second.empty()) return found;
        std::vector<Entry> left;
        int64_t end = offset + nbytes;
        for (Entry& e : at->second) {
            if (e.at >= end || offset >= e.at + e.nbytes) {
                left.push_back(std::move(e));
                continue;
            }
            // the rest of its range may be written from another stream, which would not have waited
            if (e.at < offset) left.push_back({e.at, offset - e.at, e.ticket});
            if (end < e.at + e.nbytes) left.push_back({end, e.at + e.nbytes - end, e.ticket});
            found.push_back(std::move(e.ticket));
        }
        at->second.swap(left);
        return found;
    }

   private:
    struct Entry {
        int64_t at, nbytes;
        Held ticket;
    };
    u64 key(int region, int64_t offset) const { return static_cast<u64>(region) << 48 | (by_offset_[region] ? offset + 1 : 0); }
    std::vector<bool> by_offset_;
    std::unordered_map<u64, std::vector<Entry>> reading_;
};

constexpr int STEPS = 2;  // places alternate at most

struct Spot {  // of an action's or post's bytes, in a step of even or odd number
    int region;
    int64_t offset;
    u64 address;
    py::object view;  // uint8, 1-D
};

struct Post {
    int stream, src;
    Spot spot[STEPS];
    int64_t nbytes, origin[STEPS];  // in the peer's allocation, or -1
    int ahead, unit;
    bool odd, backward;  // whether the round is odd
};

enum class Does {  // what an action of the program does here; PYTHON: its handler
    PYTHON, POSTS, PULL, RELAYED_POSTS, PUBLISH, OFFER, WAIT_PARAM, RELEASE_PARAM, RECV_GRAD, SEND_GRAD, PREDICT, REDUCE
};

struct Bytes {  // of one of the rank's regions
    int region;
    int64_t offset, nbytes;
};

struct Action {
    py::object action;
    Does does;
    int stream, peer, unit;  // peer -1: none
    bool odd, backward, first, relayed;  // first: in round 0
    Spot spot[STEPS];
    int64_t nbytes, version;
    int64_t into[STEPS];  // where a pushed message lands in the peer's allocation, or -1
    int source;           // rank, among all ranks, that the sum comes from
    bool source_odd;
    std::vector<Post> posts;
    Bytes sum;                                    // of the owner's actions: the unit's; region -1: none
    std::vector<std::vector<Bytes>> overwritten;  // of REDUCE, by slot: what it writes
};

class Messages {
   public:
    Messages(std::shared_ptr<Links> links, std::shared_ptr<Reads> reads, py::object state, py::object locate, bool last)
        : links(std::move(links)), reads(std::move(reads)), state(std::move(state)), locate(std::move(locate)), last(last) {
        grads_ = this->links->code("G");
        sums_ = this->reads->find("O");
    }

    std::shared_ptr<Links> links;
    std::shared_ptr<Reads> reads;
    py::object state;  // RankState
    py::object locate;  // (action, global step) -> a place for errors
    bool last;         // this is the ring's last rank

    int64_t step() {  // the rank's; every call from Python asks for it first
        static const py::handle global_step = interned("global_step"), step = interned("step");
        global_step_ = py::cast<int64_t>(state.attr(global_step));
        links->look_for_timing();
        return py::cast<int64_t>(state.attr(step));
    }
    Place place_of(const Action& a) const { return {locate, a.action, global_step_}; }
    bool of_corrections(const Spot& spot) const { return reads->regions[spot.region][0] == 'W'; }
    bool of_sums(const Spot& spot) const { return spot.region == sums_; }

    void clear() {
        arrivals_.clear();
        reads->clear();
    }

    void post(const Post& p, const Place& place, bool relayed, u64 current, int64_t step, u64 into = 0) {
        int64_t at = step + p.ahead;
        const Spot& spot = p.spot[at & 1];
        std::vector<Held> after;
        if (!into) after = reads->take(spot.region, spot.offset, p.nbytes);
        Held ticket = links->post(p.stream, p.src, into ? into : spot.address, p.nbytes, after, p.origin[at & 1],
                                  relayed ? links->relay : current, place);
        ticket->counted = p.stream == grads_;  // in ``back``: a relay's wait may come in another step
        if (!arrivals_.emplace(key(p.stream, at, p.odd, p.unit, p.backward), std::move(ticket)).second)
            throw std::logic_error("two messages for one pass");
    }

    void post_all(const Action& a, bool relayed, u64 current, int64_t step) {
        for (const Post& p : a.posts) post(p, place_of(a), relayed, current, step);
    }

    void offer(const Action& a, const Held& back, int64_t step) {
        if (back) links->wait(*back, place_of(a), links->relay);
        const Spot& spot = a.spot[step & 1];
        Held ticket = links->push(a.stream, a.peer, spot.address, a.nbytes, nullptr, -1, links->relay);
        reads->add(spot.region, spot.offset, a.nbytes, std::move(ticket));
    }

    void push(const Action& a, const Ticket* after, u64 current, int64_t step) {
        const Spot& spot = a.spot[step & 1];
        Held ticket = links->push(a.stream, a.peer, spot.address, a.nbytes, after, a.into[step & 1], current);
        reads->add(spot.region, spot.offset, a.nbytes, std::move(ticket));
    }

    Held wait(const Action& a, u64 current, int64_t step) {
        if (a.peer < 0) return nullptr;
        Held ticket = pop(key(a.stream, step, a.odd, a.unit, a.backward));
        links->wait(*ticket, place_of(a), current);
        return ticket;
    }

    void wait_ahead(const Action& a, u64 current, int64_t step) {
        links->wait(*arrivals_.at(key(a.stream, step, a.odd, a.unit, a.backward)), place_of(a), current);
    }

    // The message with an owned unit's sum that comes back from ``source`` (among all ranks).
    Held back(int64_t step, int unit, int source, bool odd, int64_t nbytes) {
        links->count_received(grads_, source, nbytes);
        return pop(key(grads_, step, odd, unit, true));
    }

    Held coming_back(int64_t step, int unit, bool odd) const {
        auto at = arrivals_.find(key(grads_, step, odd, unit, true));
        return at == arrivals_.end() ? nullptr : at->second;
    }

    void wait_readers(const Action& a, int region, int64_t offset, int64_t nbytes, u64 current) {
        for (const Held& ticket : reads->take(region, offset, nbytes)) links->wait(*ticket, place_of(a), current);
    }
    void wait_readers(const Action& a, const Bytes& bytes, u64 current) {
        wait_readers(a, bytes.region, bytes.offset, bytes.nbytes, current);
    }

   private:
    static u64 key(int stream, int64_t step, bool odd, int unit, bool backward) {
        u64 message = static_cast<u64>(unit + 1) << 6 | static_cast<u64>(stream) << 2 | odd << 1 | backward;
        return static_cast<u64>(step) << 28 | message;
    }

    Held pop(u64 key) {
        auto at = arrivals_.find(key);
        if (at == arrivals_.end()) throw std::logic_error("no post for this message");
        Held ticket = std::move(at->second);
        arrivals_.erase(at);
        return ticket;
    }

    int grads_, sums_;  // stream G, region O
    int64_t global_step_ = 0;
    std::unordered_map<u64, Held> arrivals_;
};
