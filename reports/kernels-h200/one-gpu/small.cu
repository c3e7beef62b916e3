// Kernels of one warp: one that waits, one that adds fp32 to memory by bulk reductions. Of our own; for beside_products.py.
typedef unsigned long long u64;
typedef unsigned int u32;

constexpr u32 STAGES = 4, LAG = 2, CHUNK = 1024, BARRIERS = 128;  // bytes of shared memory: BARRIERS + STAGES * CHUNK

__device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }
__device__ u32 here() { u32 sm; asm volatile("mov.u32 %0, %smid;" : "=r"(sm)); return sm; }
__device__ u32 shared(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// stamps [CTAs, 2]: when each CTA began, and on which multiprocessor
extern "C" __global__ void wait(long long ns, u64* stamps) {
  if (threadIdx.x) return;
  u64 start = now();
  stamps[2 * blockIdx.x] = start;
  stamps[2 * blockIdx.x + 1] = here();
  while (now() - start < ns) {}
}

__device__ void load(char* to, const char* from, u32 bytes, u64* barrier) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barrier)), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared(to)),
               "l"(from), "r"(bytes), "r"(shared(barrier)) : "memory");
}

__device__ void loaded(u64* barrier, u32 parity) {
  u32 done = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(shared(barrier)), "r"(parity) : "memory");
}

// `to` += `from`, both of so many bytes, a multiple of 16
extern "C" __global__ void __launch_bounds__(32) push_bulk(const char* from, char* to, long long bytes) {
  extern __shared__ __align__(128) char memory[];
  if (threadIdx.x) return;
  u64* barriers = (u64*)memory;
  char* stages = memory + BARRIERS;
  for (u32 s = 0; s < STAGES; s++)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(barriers + s)));
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  long long step = (long long)gridDim.x * CHUNK, first = (long long)blockIdx.x * CHUNK;
  int count = first < bytes ? (int)((bytes - first + step - 1) / step) : 0;
  auto size = [&](int n) { return (u32)min((long long)CHUNK, bytes - first - n * step); };
  for (int n = 0; n < STAGES - LAG && n < count; n++)
    load(stages + n * CHUNK, from + first + n * step, size(n), barriers + n);
  for (int n = 0; n < count; n++) {
    u32 stage = n % STAGES;
    loaded(barriers + stage, n / STAGES & 1);
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to + first + n * step),
                 "r"(shared(stages + stage * CHUNK)), "r"(size(n)) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    int next = n + STAGES - LAG;
    if (next >= count) continue;
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
    load(stages + next % STAGES * CHUNK, from + first + next * step, size(next), barriers + next % STAGES);
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
