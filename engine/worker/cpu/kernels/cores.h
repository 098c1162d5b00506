// A core for each thread of a step, so that no two wait for each other on one. Linux only.

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
    CpuSet all;          // on which the process may run
    const CpuSet* each;  // [num_cores] the CPUs of a core
    std::int64_t num_cores;
};

}  // extern "C"

namespace {

// Which core each thread has: of one caller and those that compute with it.
struct Places {
    std::vector<std::int64_t> core_of;  // [threads]
    std::vector<pid_t> ids;             // [threads] 0: not known yet
    std::int64_t version = 0;           // another one whenever it begins anew
};

// Keeps the threads of a parallel region each on a core. The first one is kept where it is, and free again behind the
// region: between steps it does other things, wherever there is room. The others stay; but for the one whose core the first
// has come to, which is sent, while it sleeps, to where the first was.
class OneForEach {
  public:
    // Made by the first thread, before the region.
    OneForEach(const Cores& cores, std::int64_t num_threads) : cores_(cores), places_(kept_places()) {
        const bool has_all = num_threads == cores.num_cores;  // else other work has a core: the system chooses which
        if (!has_all || num_threads != static_cast<std::int64_t>(places_.core_of.size())) begin();
        is_kept_ = has_all && is_free() && take_core(core_here());
    }

    ~OneForEach() {
        if (is_kept_) run_on(0, cores_.all);
    }

    OneForEach(const OneForEach&) = delete;
    OneForEach& operator=(const OneForEach&) = delete;

    // By each thread of the region.
    void stay() const {
        static thread_local std::int64_t known = 0;
        const int thread = omp_get_thread_num();
        if (!is_kept_ || thread == 0 || known == places_.version) return;
        places_.ids[thread] = static_cast<pid_t>(syscall(SYS_gettid));
        if (run_on(0, cores_.each[places_.core_of[thread]])) known = places_.version;
    }

  private:
    static Places& kept_places() {
        static thread_local Places places;
        return places;
    }

    // Anew after a step without some of the threads: they may have ended since, and others have their ids.
    void begin() {
        places_.core_of.resize(cores_.num_cores);
        std::iota(places_.core_of.begin(), places_.core_of.end(), 0);
        places_.ids.assign(cores_.num_cores, 0);
        ++places_.version;
    }

    std::int64_t core_here() const {
        const int cpu = sched_getcpu();
        for (std::int64_t core = 0; cpu >= 0 && core < cores_.num_cores; ++core)
            if (cores_.each[core].bits[cpu / 64] >> (cpu % 64) & 1) return core;
        return -1;
    }

    // Whoever had it gets the one that the first thread had.
    bool take_core(std::int64_t core) {
        if (core < 0 || !run_on(0, cores_.each[core])) return false;
        for (std::int64_t thread = 1; thread < cores_.num_cores; ++thread)
            if (places_.core_of[thread] == core) {
                std::swap(places_.core_of[0], places_.core_of[thread]);
                if (places_.ids[thread] != 0) run_on(places_.ids[thread], cores_.each[places_.core_of[thread]]);
            }
        return true;
    }

    // Not where somebody has given the first thread other CPUs since: those are theirs to choose.
    bool is_free() const {
        CpuSet now{};
        return sched_getaffinity(0, sizeof now, reinterpret_cast<cpu_set_t*>(&now)) == 0 &&
               std::memcmp(&now, &cores_.all, sizeof now) == 0;
    }

    static bool run_on(pid_t thread, const CpuSet& cpus) {
        return sched_setaffinity(thread, sizeof cpus, reinterpret_cast<const cpu_set_t*>(&cpus)) == 0;
    }

    const Cores& cores_;
    Places& places_;
    bool is_kept_ = false;
};

}  // namespace
