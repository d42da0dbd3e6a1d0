#pragma once

#include <exception>
#include <functional>
#include <initializer_list>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

class shipped_pair;

namespace check {

struct failure : std::logic_error {
    using std::logic_error::logic_error;
};

struct test {
    test(const char * title, void (*of_pair)(const shipped_pair &)) : name(title), body(of_pair) {}
    test(const char * title, void (*alone)())
        : name(title), body([alone](const shipped_pair &) { alone(); }) {}

    const char * name;
    std::function<void(const shipped_pair &)> body;
};

inline std::vector<test> & all() {
    static std::vector<test> tests;
    return tests;
}

// A file lists its tests in one of these.
struct tests {
    tests(std::initializer_list<test> of_file) {
        all().insert(all().end(), of_file.begin(), of_file.end());
    }
};

inline void that(bool ok, const std::string & what) {
    if (!ok) {
        throw failure(what);
    }
}

template <typename T>
void equal(const T & found, const T & expected, const std::string & what) {
    that(found == expected, what);
}

// `call` throws exactly this, with `part` in its message.
template <typename Error, typename Call>
void throws(const Call & call, const std::string & part, const std::string & what) {
    try {
        call();
    } catch (const Error & e) {
        that(std::string(e.what()).find(part) != std::string::npos,
             what + ": the message lacks '" + part + "': " + e.what());
        return;
    } catch (const std::exception & e) {
        throw failure(what + ": another error: " + e.what());
    }
    throw failure(what + ": no error");
}

// Runs all tests; 0 when all pass.
inline int run(const shipped_pair & pair) {
    int n_failed = 0;
    for (const test & t : all()) {
        try {
            t.body(pair);
            std::cout << "ok      " << t.name << std::endl;
        } catch (const std::exception & e) {
            std::cout << "FAILED  " << t.name << "\n        " << e.what() << std::endl;
            n_failed++;
        }
    }
    return n_failed == 0 ? 0 : 1;
}

}  // namespace check
