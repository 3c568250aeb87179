// Stages and their team by themselves, for test_stages.py. Usage: stages_check CASE THREADS
//
// Exits with 0, or says what is wrong. Where somebody waits for a thread that the case keeps away, it hangs.
#include "stages.hpp"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <random>
#include <sstream>
#include <string>
#include <system_error>
#include <vector>

using tercet::Stages;
using tercet::Team;

namespace {

#define CHECK(condition)                                                        \
    do {                                                                        \
        if (!(condition)) {                                                     \
            std::fprintf(stderr, "line %d: not so: %s\n", __LINE__, #condition); \
            std::_Exit(1);                                                      \
        }                                                                       \
    } while (false)

// Whoever passes waits until it is open.
class Gate {
  public:
    void open() {
        open_.store(1);
        Team::wake(open_);
    }
    void pass() {
        while (open_.load() == 0) Team::sleep(open_, 0);
    }
    bool is_open() const { return open_.load() != 0; }

  private:
    std::atomic<std::uint32_t> open_{0};
};

// `body`, called with a thread's number, outlives the job.
template <class Body>
void start(Team& team, const Body& body) {
    team.start([](void* context, std::int32_t thread) { (*static_cast<const Body*>(context))(thread); },
               const_cast<void*>(static_cast<const void*>(&body)));
}

// What a thread that was away reads, others write meanwhile. This is meant, and for that reader it is atomic here. For all others it is
// not, so that the thread sanitizer would see where an order is missing.
struct Value {
    std::atomic<std::uint64_t> shared{0};
    std::uint64_t plain = 0;
};

std::uint64_t peek(const Value& value) { return value.shared.load(std::memory_order_relaxed); }
std::uint64_t get(const Value& value) { return value.plain; }
void put(Value& value, std::uint64_t to) {
    value.shared.store(to, std::memory_order_relaxed);
    value.plain = to;
}

// One thread is away in the middle of a unit of the first stage: the others go on without it, to the end of the job. It comes back
// when memory has long been used for something else, and touches nothing.
void away(std::int32_t size, std::int32_t who) {
    constexpr std::int32_t kUnits = 37;
    constexpr std::uint64_t kElsewhere = 7'000'000;
    Team team(size);
    Stages stages(team);
    for (int round = 0; round < 20; ++round) {
        stages.reset();
        std::vector<Value> values(kUnits), sums(kUnits);
        std::vector<std::atomic<std::int32_t>> writes(kUnits);
        std::atomic<std::int32_t> own_units{0}, own_writes{0};  // of the thread that is away
        Gate inside, back;
        const auto check = [&] {
            for (std::int32_t unit = 0; unit < kUnits; ++unit) {
                const auto at = static_cast<std::size_t>(unit);
                CHECK(writes[at].load() == 1);
                CHECK(get(values[at]) == at + 1 + 3 * kUnits);
                CHECK(get(sums[at]) == 2 * (at + 1));
            }
            CHECK(own_writes.load() == 0);
        };
        const auto body = [&](std::int32_t thread) {
            Stages::Walk walk{thread};
            std::uint64_t own = 0;
            bool first = true;
            stages.again(
                walk, kUnits,
                [&](std::int32_t unit) {
                    own = static_cast<std::uint64_t>(unit) + 1;
                    if (thread == who) ++own_units;
                    if (!first) return;
                    first = false;
                    if (thread != who) return inside.pass();  // so that something is left for it
                    inside.open();
                    back.pass();
                },
                [&](std::int32_t unit) {
                    put(values[static_cast<std::size_t>(unit)], own);
                    ++writes[static_cast<std::size_t>(unit)];
                    if (thread == who) ++own_writes;
                });
            stages.once(walk, kUnits, [&](std::int32_t unit) {
                if (thread == who) ++own_units;
                put(sums[static_cast<std::size_t>(unit)], 2 * get(values[static_cast<std::size_t>(unit)]));
            });
            for (int i = 0; i < 3; ++i) {  // as a product that adds to what is there
                stages.again(
                    walk, kUnits,
                    [&](std::int32_t unit) {
                        if (thread == who) ++own_units;
                        own = peek(values[static_cast<std::size_t>(unit)]) + kUnits;
                    },
                    [&](std::int32_t unit) {
                        put(values[static_cast<std::size_t>(unit)], own);
                        if (thread == who) ++own_writes;
                    });
            }
            if (who != 0 || thread == 0) return;
            // The caller is away.
            check();
            back.open();
        };
        start(team, body);
        check();
        if (who != 0) {
            CHECK(!back.is_open());
            for (Value& value : values) put(value, kElsewhere);
            for (Value& value : sums) put(value, kElsewhere);
            back.open();
            team.settle();
            for (const Value& value : values) CHECK(get(value) == kElsewhere);
            for (const Value& value : sums) CHECK(get(value) == kElsewhere);
        }
        team.settle();
        CHECK(own_writes.load() == 0);
        CHECK(own_units.load() == 1);  // nothing was left in the stages that it passed later
    }
}

// Whether a thread of this process sleeps in the system.
bool asleep(pid_t thread) {
    std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/stat");
    std::stringstream text;
    text << file.rdbuf();
    const std::string all = text.str();
    const std::size_t name = all.rfind(')');
    CHECK(name != std::string::npos && name + 2 < all.size());
    return all[name + 2] == 'S';
}

// A unit that nobody else can do takes so long that the others fall asleep: they are woken.
void sleeping(std::int32_t size) {
    Team team(size);
    Stages stages(team);
    std::vector<std::atomic<pid_t>> ids(static_cast<std::size_t>(size));
    for (int round = 0; round < 50; ++round) {
        stages.reset();
        for (auto& id : ids) id.store(0);
        std::atomic<std::int32_t> done{0};
        const auto body = [&](std::int32_t thread) {
            ids[static_cast<std::size_t>(thread)].store(static_cast<pid_t>(syscall(SYS_gettid)));
            Stages::Walk walk{thread};
            for (int i = 0; i < 3; ++i) {
                stages.once(walk, 1, [&](std::int32_t) {
                    ++done;
                    for (std::int32_t other = 0; other < size; ++other) {
                        const auto& id = ids[static_cast<std::size_t>(other)];
                        // In their first stage they have nothing to sleep for but this one.
                        while (other != thread && (id.load() == 0 || !asleep(id.load()))) Team::yield();
                    }
                });
            }
        };
        start(team, body);
        team.settle();
        CHECK(done.load() == 3);
    }
}

// Random rows of stages on one processor that another process keeps busy, so that threads are away in the middle of units all the
// time, until many units were done again. Every value follows from values of the stage before.
void busy(std::int32_t size) {
    constexpr std::int32_t kRounds = 20, kAgain = 10;
    cpu_set_t allowed, one;
    CHECK(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
    CPU_ZERO(&one);
    for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
        if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &one);
    }
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    const pid_t parent = getpid();
    const pid_t other = fork();
    CHECK(other >= 0);
    if (other == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        while (getppid() == parent) {
        }
        _exit(0);
    }
    {
        Team team(size);
        Stages stages(team);
        std::mt19937 random(static_cast<std::uint32_t>(size));
        const auto below = [&](std::int32_t end) { return static_cast<std::int32_t>(random() % static_cast<std::uint32_t>(end)); };
        const auto most = static_cast<std::size_t>(stages.most());
        const auto mixed = [](std::uint64_t value) { return (value ^ value >> 29) * 0xbf58476d1ce4e5b9u + 1; };
        std::int64_t again = 0;
        for (int round = 0; round < kRounds || (again < kAgain && size > 1); ++round) {
            struct Stage {
                std::int32_t count;
                bool again;
                int work;
            };
            std::vector<Stage> plan(static_cast<std::size_t>(1 + below(30)));
            for (Stage& stage : plan) {
                const std::int32_t counts[] = {0, 1, size - 1, size, size + 1, below(stages.most()), stages.most()};
                stage = {counts[below(7)], below(3) != 0, below(2'000)};
            }
            std::vector<Value> values(most), expected(most);
            for (std::size_t i = 0; i < most; ++i) put(values[i], i), put(expected[i], i);
            const auto step = [&](const std::vector<Value>& from, const Stage& stage, std::int32_t unit) {
                std::uint64_t value = peek(from[static_cast<std::size_t>(unit)]);
                for (int i = 0; i < stage.work; ++i) value = mixed(value);
                return value;
            };
            const auto gathered = [&](const std::vector<Value>& from) {
                std::uint64_t all = 0;
                for (const Value& value : from) all = mixed(all ^ get(value));
                return all;
            };
            std::vector<std::uint64_t> sums(plan.size());
            for (std::size_t i = 0; i < plan.size(); ++i) {
                sums[i] = gathered(expected);
                for (std::int32_t unit = 0; unit < plan[i].count; ++unit) {
                    put(expected[static_cast<std::size_t>(unit)], step(expected, plan[i], unit));
                }
            }
            std::atomic<std::int64_t> computed{0}, wanted{0};
            const auto body = [&](std::int32_t thread) {
                Stages::Walk walk{thread};
                for (std::size_t i = 0; i < plan.size(); ++i) {
                    const Stage& stage = plan[i];
                    std::uint64_t own = 0;
                    stages.once(walk, 1, [&](std::int32_t) { CHECK(gathered(values) == sums[i]); });
                    if (!stage.again) {
                        stages.once(walk, stage.count, [&](std::int32_t unit) {
                            put(values[static_cast<std::size_t>(unit)], step(values, stage, unit));
                        });
                        continue;
                    }
                    stages.again(
                        walk, stage.count,
                        [&](std::int32_t unit) {
                            computed.fetch_add(1, std::memory_order_relaxed);
                            own = step(values, stage, unit);
                        },
                        [&](std::int32_t unit) {
                            wanted.fetch_add(1, std::memory_order_relaxed);
                            put(values[static_cast<std::size_t>(unit)], own);
                        });
                }
            };
            stages.reset();
            start(team, body);
            for (std::size_t i = 0; i < most; ++i) CHECK(get(values[i]) == get(expected[i]));
            team.settle();  // who was late has changed nothing
            for (std::size_t i = 0; i < most; ++i) CHECK(get(values[i]) == get(expected[i]));
            std::int64_t units = 0;
            for (const Stage& stage : plan) units += stage.again ? stage.count : 0;
            CHECK(wanted.load() == units);
            again += computed.load() - units;
        }
        std::printf("%lld units were done again\n", static_cast<long long>(again));
    }
    kill(other, SIGKILL);
    CHECK(waitpid(other, nullptr, 0) == other);
}

// Where the system has no memory for all threads, those that were started end.
void refused(std::int32_t size) {
    std::ifstream file("/proc/self/statm");
    rlim_t pages = 0;
    file >> pages;
    const rlim_t room = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{100} << 20);
    const rlimit limit{room, room};
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    bool threw = false;
    try {
        Team team(size);
    } catch (const std::system_error&) {
        threw = true;
    }
    CHECK(threw);
}

}  // namespace

int main(int argc, char** argv) {
    CHECK(argc == 3);
    const std::string name = argv[1];
    const std::int32_t threads = std::atoi(argv[2]);
    if (name == "helper-away") {
        away(threads, threads - 1);
    } else if (name == "caller-away") {
        away(threads, 0);
    } else if (name == "sleeping") {
        sleeping(threads);
    } else if (name == "busy") {
        busy(threads);
    } else if (name == "refused") {
        refused(threads);
    } else {
        CHECK(false);
    }
    return 0;
}
