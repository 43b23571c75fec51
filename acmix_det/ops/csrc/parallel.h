// Runs independent tasks on the threads of the caller's OpenMP runtime.
#pragma once

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "local_attention.h"

namespace acmix_det {

// Calls task(0) .. task(count - 1), each once, on up to num_threads threads.
// A task must not write what another one touches, so that the result does not
// depend on the number of threads.
template <class Task>
Status parallel_for(const Problem& problem, int64_t count, const Task& task) {
  struct Shared {
    const Task& task;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};

    static void run(void* self) {
      auto& shared = *static_cast<Shared*>(self);
      try {
        for (int64_t i; (i = shared.next++) < shared.count;) shared.task(i);
      } catch (...) {  // std::bad_alloc, the only one there is
        shared.failed = true;
        shared.next = shared.count;
      }
    }
  } shared{task, count};

  const int64_t threads = std::min(problem.num_threads, count);
  if (threads <= 1) {
    Shared::run(&shared);
  } else if (problem.parallel) {
    problem.parallel(Shared::run, &shared, static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::thread> workers;
    try {
      for (int64_t i = 1; i < threads; ++i)
        workers.emplace_back(Shared::run, &shared);
    } catch (...) {  // fewer threads do the same work
    }
    Shared::run(&shared);
    for (auto& worker : workers) worker.join();
  }
  return shared.failed ? kOutOfMemory : kOk;
}

}  // namespace acmix_det
