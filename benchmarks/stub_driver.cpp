// A CUDA driver without devices: every call succeeds at once and is recorded, so that host code can run, be timed and compared.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace {
struct Call {
    uint64_t kind, stream, a, b, c;
};
enum { WAIT = 1, WRITE, COPY, RECORD, FOLLOW, FILL, QUERY, BATCH };
std::vector<Call> calls;
std::mutex lock;
bool recording = false;
int stuck = 0, failing = 0, single = 0;  // event queries are not ready; copies fail; words come one by one
uint64_t total = 0, handles = 1000;

int note(uint64_t kind, uint64_t stream, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
    if (kind != BATCH) ++total;
    if (recording) {
        std::lock_guard<std::mutex> held(lock);
        calls.push_back({kind, stream, a, b, c});
    }
    return 0;
}
struct Memory {  // CUstreamBatchMemOpParams
    uint32_t operation, pad;
    uint64_t address, value;
    uint32_t flags, pad2;
    uint64_t alias, pad3;
};
}  // namespace

extern "C" {
int cuStreamWaitValue32_v2(uint64_t s, uint64_t address, uint32_t value, unsigned) { return note(WAIT, s, address, value); }
int cuStreamWriteValue32_v2(uint64_t s, uint64_t address, uint32_t value, unsigned) { return note(WRITE, s, address, value); }
int cuStreamBatchMemOp_v2(uint64_t s, unsigned count, const Memory* ops, unsigned) {
    if (single) return 801;  // CUDA_ERROR_NOT_SUPPORTED
    ++total;
    note(BATCH, s, count);
    for (unsigned i = 0; i < count; ++i) {
        --total;  // one call, however many operations
        note(ops[i].operation == 1 ? WAIT : WRITE, s, ops[i].address, static_cast<uint32_t>(ops[i].value));
    }
    return 0;
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t source, size_t n, uint64_t s) {
    return failing ? 1 : note(COPY, s, to, source, n);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t n, uint64_t s) { return note(FILL, s, to, value, n); }
int cuEventRecord(uint64_t event, uint64_t s) { return note(RECORD, s, event); }
int cuStreamWaitEvent(uint64_t s, uint64_t event, unsigned) { return note(FOLLOW, s, event); }
int cuEventQuery(uint64_t) { return stuck ? 600 : 0; }  // CUDA_ERROR_NOT_READY
int cuEventCreate(uint64_t* event, unsigned) { *event = ++handles; return 0; }
int cuStreamCreateWithPriority(uint64_t* stream, unsigned, int) { *stream = ++handles; return 0; }
int cuStreamDestroy_v2(uint64_t) { return 0; }
int cuStreamQuery(uint64_t) { return 0; }
// the transport's memory is not the driver's here: stub_cuda.py
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuMemGetAllocationGranularity(size_t*, void*, int) { return 2; }
int cuMemCreate(uint64_t*, size_t, void*, uint64_t) { return 2; }
int cuMemRelease(uint64_t) { return 0; }
int cuMemRetainAllocationHandle(uint64_t*, uint64_t) { return 2; }
int cuMemAddressReserve(uint64_t*, size_t, size_t, uint64_t, uint64_t) { return 2; }
int cuMemAddressFree(uint64_t, size_t) { return 0; }
int cuMemMap(uint64_t, size_t, size_t, uint64_t, uint64_t) { return 2; }
int cuMemUnmap(uint64_t, size_t) { return 0; }
int cuMemSetAccess(uint64_t, size_t, void*, size_t) { return 2; }
int cuMemExportToShareableHandle(int*, uint64_t, int, uint64_t) { return 2; }
int cuMemImportFromShareableHandle(uint64_t*, void*, int) { return 2; }
int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR_STUB"; return 0; }

void stub_record(int on) { recording = on; std::lock_guard<std::mutex> held(lock); calls.clear(); }
void stub_stick(int on) { stuck = on; }
void stub_fail(int on) { failing = on; }
void stub_single(int on) { single = on; }
uint64_t stub_total() { return total; }
uint64_t stub_take(Call* out, uint64_t most) {
    std::lock_guard<std::mutex> held(lock);
    uint64_t n = calls.size() < most ? calls.size() : most;
    std::memcpy(out, calls.data(), n * sizeof(Call));
    calls.clear();
    return n;
}
}
