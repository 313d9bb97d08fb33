// The Python face: launches take addresses and sizes, in the order of the structs in args.h; fitment_cpu/kernels checks them before.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <new>

#include "args.h"
#include "dispatch.h"
#include "memory.h"
#include "pack.h"
#include "pool.h"
#include "scratch.h"

namespace nb = nanobind;
using namespace fitment;

namespace {

using Address = uintptr_t;

// Elements, or multiplications, below which a launch runs on the calling thread alone: a second one costs more than it saves.
constexpr int64_t solo_elements = 16384;
constexpr int64_t solo_products = int64_t(1) << 17;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void start(const Call& call) {
    nb::gil_scoped_release release;
    launch(call);
}

struct OwnedWeight : Weight, std::enable_shared_from_this<OwnedWeight> {
    OwnedWeight() : Weight{} {}
    std::shared_ptr<void> memory;
};

std::shared_ptr<OwnedWeight> packed(Kind kind, int rows, int cols, int group, bool half, Pack pack) {
    auto weight = std::make_shared<OwnedWeight>();
    weight->kind = kind;
    weight->rows = rows;
    weight->cols = cols;
    weight->group = group;
    weight->half_params = half;
    if (!plan_weight(*weight)) throw nb::value_error("a weight of this shape and group size cannot be packed");
    weight->memory = allocate(size_t(weight->bytes));
    weight->data = static_cast<uint8_t*>(weight->memory.get());
    pack.weight = weight.get();
    Kernel kernel{{&pack_tiles, nullptr, nullptr}};
    Call call = make_call(kernel, pack, num_threads(), false);
    nb::gil_scoped_release release;
    run(&call, 1);
    return weight;
}

std::shared_ptr<OwnedWeight> pack_affine(int bits, int rows, int cols, int group, Address codes, int64_t stride, Address scale, Address bias) {
    int64_t count = int64_t(rows) * (group > 0 ? (cols + group - 1) / group : 0);
    bool half = exact_in_half(at<float>(scale), count) && exact_in_half(at<float>(bias), count);
    return packed(bits <= 4 ? Kind::affine4 : Kind::affine8, rows, cols, group, half, {nullptr, at(codes), at<float>(scale), at<float>(bias), stride});
}

std::shared_ptr<OwnedWeight> pack_dense(int type, int rows, int cols, Address values, int64_t stride) {
    constexpr Kind kinds[] = {Kind::fp32, Kind::bf16, Kind::fp16};
    return packed(kinds[type], rows, cols, 0, false, {nullptr, at(values), nullptr, nullptr, stride});
}

void linear(Address x, Address out, const OwnedWeight& weight, int64_t x_stride, int64_t out_stride, int n, int x_type, int out_type,
            int activations) {
    if (n == 0) return;
    Linear args{at(x), at(out), &weight, nullptr, x_stride, out_stride, n, Type(x_type), Type(out_type), Activations(activations)};
    int threads = num_threads();
    bool is_few = int64_t(n) * weight.cols <= linear_few_elements;
    int64_t one = linear_scratch_bytes(args, 1);
    std::shared_ptr<void> memory = scratch(size_t(is_few ? one * threads : linear_scratch_bytes(args, threads)));
    args.scratch = memory.get();
    keep(weight.shared_from_this());
    bool is_solo = int64_t(n) * weight.cols * weight.rows <= solo_products;
    start(make_call(is_few ? table().linear_few : table().linear, args, threads, is_solo));
}

void embedding(Address ids, Address out, const OwnedWeight& weight, int64_t out_stride, int n, int type) {
    Embedding args{at<int32_t>(ids), at(out), &weight, out_stride, n, Type(type)};
    keep(weight.shared_from_this());
    start(make_call(table().embedding, args, num_threads(), int64_t(n) * weight.cols <= solo_elements));
}

void rms_norm(Address x, Address weight, Address out, Address residual, int64_t x_stride, int64_t out_stride, int64_t residual_stride, float eps,
              int n, int hidden, int type) {
    RmsNorm args{at(x), at<float>(weight), at(out), at(residual), x_stride, out_stride, residual_stride, eps, n, hidden, Type(type)};
    start(make_call(table().rms_norm, args, num_threads(), int64_t(n) * hidden <= solo_elements));
}

void rotary(Address q, Address k, Address positions, Address cos_sin, int64_t q_stride, int64_t q_head_stride, int64_t k_stride,
            int64_t k_head_stride, int n, int num_heads, int num_kv_heads, int rot, int max_position, int type) {
    Rotary args{at(q), at(k), at<int32_t>(positions), at<float>(cos_sin), q_stride, q_head_stride, k_stride, k_head_stride,
                n, num_heads, num_kv_heads, rot, max_position, Type(type)};
    start(make_call(table().rotary, args, num_threads(), int64_t(n) * (num_heads + num_kv_heads) * rot <= solo_elements));
}

void silu_mul(Address x, Address out, int64_t x_stride, int64_t out_stride, int n, int m, int type) {
    SiluMul args{at(x), at(out), x_stride, out_stride, n, m, Type(type)};
    start(make_call(table().silu_mul, args, num_threads(), int64_t(n) * m <= solo_elements / 2));
}

void write_kv(Address k, Address v, Address k_cache, Address v_cache, Address slot_mapping, int64_t k_stride, int64_t k_head_stride,
              int64_t v_stride, int64_t v_head_stride, int n, int num_kv_heads, int head_size, int num_blocks, int block_size, int type,
              int cache_type) {
    WriteKv args{at(k), at(v), at(k_cache), at(v_cache), at<int32_t>(slot_mapping), k_stride, k_head_stride, v_stride, v_head_stride,
                 n, num_kv_heads, head_size, num_blocks, block_size, Type(type), Type(cache_type)};
    start(make_call(table().write_kv, args, num_threads(), int64_t(n) * num_kv_heads * head_size <= solo_elements));
}

// What is attended to may grow until a tape is replayed, so only the longest that it can be says whether one thread is enough.
void paged_attention(Address q, Address k_cache, Address v_cache, Address block_table, Address cu_query_lens, Address seq_lens, Address out,
                     int64_t q_stride, int64_t q_head_stride, int64_t out_stride, int64_t out_head_stride, float scale, int num_seqs,
                     int max_blocks, int num_heads, int num_kv_heads, int head_size, int num_blocks, int block_size, int type, int cache_type) {
    if (num_seqs == 0) return;
    PagedAttention args{at(q), at(k_cache), at(v_cache), at<int32_t>(block_table), at<int32_t>(cu_query_lens), at<int32_t>(seq_lens), at(out),
                        nullptr, q_stride, q_head_stride, out_stride, out_head_stride, scale, num_seqs, max_blocks, num_heads, num_kv_heads,
                        head_size, num_blocks, block_size, Type(type), Type(cache_type)};
    int threads = num_threads();
    std::shared_ptr<void> memory = scratch(size_t(paged_attention_scratch_bytes(args, threads)) + line_bytes);
    args.scratch = memory.get();
    start(make_call(table().paged_attention, args, threads, int64_t(num_heads) * head_size * max_blocks * block_size <= solo_products / 4));
}

void sample(Address logits, Address temperature, Address top_k, Address top_p, Address min_p, Address uniform, Address out,
            int64_t logits_stride, int n, int vocab) {
    Sample args{at<float>(logits), at<float>(temperature), at<int32_t>(top_k), at<float>(top_p), at<float>(min_p), at<float>(uniform),
                at<int32_t>(out), logits_stride, n, vocab};
    start(make_call(table().sample, args, num_threads(), n == 1));
}

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Table* t : runnable_tables()) names.push_back(t->name);
    return names;
}

void replay(const Tape& tape) {
    nb::gil_scoped_release release;
    run(tape.calls.data(), tape.calls.size());
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // what is still alive when the interpreter ends is no leak
    m.doc() = "The native kernels of fitment_cpu.";
    nb::class_<OwnedWeight>(m, "Weight", "A packed weight.")
        .def_ro("rows", &OwnedWeight::rows)
        .def_ro("cols", &OwnedWeight::cols)
        .def_ro("nbytes", &OwnedWeight::bytes)
        .def_prop_ro("kind", [](const OwnedWeight& w) { return int(w.kind); });
    nb::class_<Tape>(m, "Tape", "Launches that were recorded.")
        .def(nb::init<>())
        .def("__len__", [](const Tape& tape) { return tape.calls.size(); })
        .def("replay", &replay, "Run them again, in one call without the interpreter's lock.");
    m.def("record", [](Tape& tape) { set_recording(&tape); }, "Record this thread's launches until stop(); hold the tape until then.");
    m.def("is_recording", [] { return recording() != nullptr; }, "Whether this thread's launches are being recorded.");
    m.def("stop", [] { set_recording(nullptr); });
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads);
    m.def("levels", &levels, "The instruction sets that were built and run here, lowest first.");
    m.def("level", [] { return std::string(table().name); }, "The one in use.");
    m.def("set_level", &set_table, "Use another one; False when it does not run here.");
    m.def("pack_affine", &pack_affine);
    m.def("pack_dense", &pack_dense);
    m.def("linear", &linear);
    m.def("embedding", &embedding);
    m.def("rms_norm", &rms_norm);
    m.def("rotary", &rotary);
    m.def("silu_mul", &silu_mul);
    m.def("write_kv", &write_kv);
    m.def("paged_attention", &paged_attention);
    m.def("sample", &sample);
}
