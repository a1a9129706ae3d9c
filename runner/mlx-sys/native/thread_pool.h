// Threads for work of tens of microseconds. The caller takes parts like everybody else and waits only for threads
// that have begun one, so a pool whose threads get no processor costs next to nothing.

#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace skinny {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  static constexpr int kMaxThreads = 16;

  // Calls `body` with each of 0..parts, on at most `threads` threads including this one.
  template <typename Body>
  void run(int threads, int parts, const Body& body) {
    // Whoever finds the pool taken is served by its own thread.
    std::unique_lock lock(busy_, std::try_to_lock);
    int seats = lock ? helpers(std::min(threads, kMaxThreads) - 1) : 0;
    if (seats == 0) {
      for (int part = 0; part < parts; ++part) {
        body(part);
      }
      return;
    }
    body_ = &body;
    call_ = [](const void* body, int part) { (*static_cast<const Body*>(body))(part); };
    parts_ = parts;
    next_.store(0, std::memory_order_relaxed);
    std::uint32_t job = (state_.load(std::memory_order_relaxed) & kJob) + kOneJob;
    state_.store(job | seats * kSeat, std::memory_order_seq_cst);
    for (int i = 0; i < seats; ++i) {
      state_.notify_one();
    }
    take_parts();
    // From here on nobody joins, and what this call lent may go once those at work are done.
    state_.fetch_and(~kSeats, std::memory_order_acq_rel);
    for (int spins = 0; state_.load(std::memory_order_acquire) & kAtWork; ++spins) {
      spins < 2000 ? pause() : std::this_thread::yield();
    }
  }

 private:
  // One word, so that joining is one step: the job's number, free seats, threads at work.
  static constexpr std::uint32_t kAtWork = 0xff, kSeat = 0x100, kSeats = 0xff00, kOneJob = 0x10000, kJob = 0xffff0000;

  // How many of `wanted` threads there are, having started those that were missing.
  int helpers(int wanted) {
    while (started_ < wanted) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        break;
      }
      ++started_;
    }
    return std::min(started_, wanted);
  }

  void take_parts() {
    for (int part; (part = next_.fetch_add(1, std::memory_order_relaxed)) < parts_;) {
      call_(body_, part);
    }
  }

  void work() {
    std::uint32_t done = 0;
    for (;;) {
      std::uint32_t state = job_after(done);
      if (!state_.compare_exchange_strong(state, state - kSeat + 1, std::memory_order_acq_rel)) {
        continue;
      }
      done = state & kJob;
      take_parts();
      state_.fetch_sub(1, std::memory_order_release);
    }
  }

  // Waits for a state with a free seat at another job than `done`: awake for about as long as a model computes
  // something else between two products, then asleep.
  std::uint32_t job_after(std::uint32_t done) {
    using namespace std::chrono;
    auto start = steady_clock::now();
    for (unsigned spins = 0;; ++spins) {
      std::uint32_t state = state_.load(std::memory_order_acquire);
      if (state & kSeats && (state & kJob) != done) {
        return state;
      }
      pause();
      if (spins % 64 == 63) {
        auto waited = steady_clock::now() - start;
        if (waited > microseconds(200)) {
          state_.wait(state, std::memory_order_acquire);
          start = steady_clock::now();
        } else if (waited > microseconds(20)) {
          // Another thread may need this processor more.
          std::this_thread::yield();
        }
      }
    }
  }

  std::mutex busy_;
  int started_ = 0;
  std::atomic<std::uint32_t> state_{0};
  std::atomic<int> next_{0};
  int parts_ = 0;
  const void* body_ = nullptr;
  void (*call_)(const void*, int) = nullptr;
};

// How much of `extent` each of about `parts` parts takes: whole steps, at least one.
inline int share(int extent, int parts, int step) {
  int steps = (extent + step - 1) / step;
  int whole = std::max(parts, 1);
  return std::max((steps + whole - 1) / whole, 1) * step;
}

// Never destroyed: its threads outlive the destructors of a process that exits.
inline Pool& pool() {
  static Pool* const pool = new Pool;
  return *pool;
}

} // namespace skinny
