// The CUDA driver's calls of transport/cuda_bindings.py. Word operations that follow one another on one stream are one call.
#pragma once
#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

using u64 = uint64_t;
using u32 = uint32_t;

class Driver {
   public:
    explicit Driver(const std::string& library) {
        void* handle = dlopen(library.c_str(), RTLD_NOW);
        if (!handle) throw std::runtime_error(dlerror());
        auto find = [&](auto& function, const char* name, bool needed = true) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, name));
            if (!function && needed) throw std::runtime_error(library + " has no " + name);
        };
        find(wait_, "cuStreamWaitValue32_v2");
        find(write_, "cuStreamWriteValue32_v2");
        find(copy_, "cuMemcpyDtoDAsync_v2");
        find(record_, "cuEventRecord");
        find(follow_, "cuStreamWaitEvent");
        find(query_, "cuEventQuery");
        find(create_, "cuEventCreate");
        find(name_, "cuGetErrorName");
        find(batch_, "cuStreamBatchMemOp_v2", false);
    }

    void wait_value(u64 stream, u64 word, u32 value) { add(stream, WAIT, word, value); }
    void write_value(u64 stream, u64 word, u32 value) { add(stream, WRITE, word, value); }

    void copy(u64 stream, u64 to, u64 source, u64 nbytes) {
        flush();
        check(copy_(to, source, nbytes, stream), "cuMemcpyDtoDAsync");
    }

    void record_event(u64 event, u64 stream) {
        flush();
        check(record_(event, stream), "cuEventRecord");
    }

    void wait_event(u64 stream, u64 event) {
        flush();
        check(follow_(stream, event, 0), "cuStreamWaitEvent");
    }

    u64 create_event() {
        u64 event = 0;
        check(create_(&event, 2), "cuEventCreate");  // CU_EVENT_DISABLE_TIMING
        return event;
    }

    bool event_done(u64 event) {
        int code = query_(event);
        if (code == 600) return false;  // CUDA_ERROR_NOT_READY
        check(code, "cuEventQuery");
        return true;
    }

    // Enqueue what has been collected.
    void flush() {
        if (words_.empty()) return;
        std::vector<Word> words;
        words.swap(words_);
        int code = NOT_SUPPORTED;
        if (batch_ && words.size() > 1) code = batch_(stream_, static_cast<unsigned>(words.size()), words.data(), 0);
        if (code != NOT_SUPPORTED) {
            check(code, "cuStreamBatchMemOp");
        } else {
            for (const Word& w : words) {
                if (w.operation == WAIT)
                    check(wait_(stream_, w.address, static_cast<u32>(w.value), 0), "cuStreamWaitValue32");
                else
                    check(write_(stream_, w.address, static_cast<u32>(w.value), 0), "cuStreamWriteValue32");
            }
        }
        words.clear();
        words_.swap(words);  // keeps its memory
    }

   private:
    enum : u32 { WAIT = 1, WRITE = 2 };  // CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
    static constexpr int NOT_SUPPORTED = 801;  // CUDA_ERROR_NOT_SUPPORTED
    static constexpr size_t MOST = 128;  // operations of a call; the driver takes 255

    struct Word {  // CUstreamBatchMemOpParams; flags 0: wait until at least the value, write behind all earlier writes
        u32 operation, pad;
        u64 address, value;
        u32 flags, pad2;
        u64 alias, pad3;
    };
    static_assert(sizeof(Word) == 48, "as in cuda.h");

    void add(u64 stream, u32 operation, u64 word, u32 value) {
        if (stream != stream_ || words_.size() == MOST) flush();
        stream_ = stream;
        words_.push_back({operation, 0, word, value, 0, 0, 0, 0});
    }

    void check(int code, const char* what) {
        if (!code) return;
        const char* name = nullptr;
        name_(code, &name);
        throw std::runtime_error(std::string(what) + ": " + (name ? name : std::to_string(code)));
    }

    int (*wait_)(u64, u64, u32, unsigned);
    int (*write_)(u64, u64, u32, unsigned);
    int (*copy_)(u64, u64, size_t, u64);
    int (*record_)(u64, u64);
    int (*follow_)(u64, u64, unsigned);
    int (*query_)(u64);
    int (*create_)(u64*, unsigned);
    int (*name_)(int, const char**);
    int (*batch_)(u64, unsigned, const Word*, unsigned);
    u64 stream_ = 0;
    std::vector<Word> words_;  // collected for ``stream_``
};
