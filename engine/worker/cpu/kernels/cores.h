// Pins each thread of a step to a core of its own, so that no two share one. Linux only.

#pragma once

#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

extern "C" {

struct CpuSet {
    std::uint64_t bits[16];  // a cpu_set_t: bit n is CPU n's
};

struct Cores {
    CpuSet all;          // CPUs on which the process may run
    const CpuSet* each;  // [num_cores] the CPUs of a core
    std::int64_t num_cores;
};

}  // extern "C"

namespace {

// The core of each thread: of one caller and the threads that compute with it.
struct ThreadCores {
    std::vector<std::int64_t> core_of;  // [threads]
    std::vector<pid_t> ids;             // [threads] 0: not known yet
    std::int64_t version = 0;           // changes at every reset
};

// Pins the threads of a parallel region to one core each. The first thread is pinned to the core where it is,
// and unpinned after the region, because it does other work between steps. The others stay pinned; only a
// thread whose core the first one has moved to is moved, while it sleeps, to the first one's former core.
class PinnedThreads {
  public:
    // Constructed by the first thread, before the region.
    PinnedThreads(const Cores& cores, std::int64_t num_threads) : cores_(cores), threads_(kept_cores()) {
        const bool has_all = num_threads == cores.num_cores;  // else another process has a core, and the system chooses which
        if (!has_all || num_threads != static_cast<std::int64_t>(threads_.core_of.size())) begin();
        is_kept_ = has_all && is_free() && take_core(core_here());
    }

    ~PinnedThreads() {
        if (is_kept_) run_on(0, cores_.all);
    }

    PinnedThreads(const PinnedThreads&) = delete;
    PinnedThreads& operator=(const PinnedThreads&) = delete;

    // Called by each thread of the region.
    void stay() const {
        static thread_local std::int64_t known = 0;
        const int thread = omp_get_thread_num();
        if (!is_kept_ || thread == 0 || known == threads_.version) return;
        threads_.ids[thread] = static_cast<pid_t>(syscall(SYS_gettid));
        if (run_on(0, cores_.each[threads_.core_of[thread]])) known = threads_.version;
    }

  private:
    static ThreadCores& kept_cores() {
        static thread_local ThreadCores places;
        return places;
    }

    // Resets after a step without some of the threads: they may have exited since, and others may have their
    // ids.
    void begin() {
        threads_.core_of.resize(cores_.num_cores);
        std::iota(threads_.core_of.begin(), threads_.core_of.end(), 0);
        threads_.ids.assign(cores_.num_cores, 0);
        ++threads_.version;
    }

    std::int64_t core_here() const {
        const int cpu = sched_getcpu();
        for (std::int64_t core = 0; cpu >= 0 && core < cores_.num_cores; ++core)
            if (cores_.each[core].bits[cpu / 64] >> (cpu % 64) & 1) return core;
        return -1;
    }

    // Pins the first thread to `core`; the thread that had it gets the first thread's former core.
    bool take_core(std::int64_t core) {
        if (core < 0 || !run_on(0, cores_.each[core])) return false;
        for (std::int64_t thread = 1; thread < cores_.num_cores; ++thread)
            if (threads_.core_of[thread] == core) {
                std::swap(threads_.core_of[0], threads_.core_of[thread]);
                if (threads_.ids[thread] != 0) run_on(threads_.ids[thread], cores_.each[threads_.core_of[thread]]);
            }
        return true;
    }

    // False if the first thread's affinity was changed by someone else since: then it is theirs to choose.
    bool is_free() const {
        CpuSet now{};
        return sched_getaffinity(0, sizeof now, reinterpret_cast<cpu_set_t*>(&now)) == 0 &&
               std::memcmp(&now, &cores_.all, sizeof now) == 0;
    }

    static bool run_on(pid_t thread, const CpuSet& cpus) {
        return sched_setaffinity(thread, sizeof cpus, reinterpret_cast<const cpu_set_t*>(&cpus)) == 0;
    }

    const Cores& cores_;
    ThreadCores& threads_;
    bool is_kept_ = false;
};

}  // namespace
