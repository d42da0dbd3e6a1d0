#pragma once

#include <exception>
#include <functional>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

struct failure : std::logic_error {
    using std::logic_error::logic_error;
};

struct test {
    const char * name;
    std::function<void()> body;
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
inline int run(const std::vector<test> & tests) {
    int n_failed = 0;
    for (const test & t : tests) {
        try {
            t.body();
            std::cout << "ok      " << t.name << std::endl;
        } catch (const std::exception & e) {
            std::cout << "FAILED  " << t.name << "\n        " << e.what() << std::endl;
            n_failed++;
        }
    }
    return n_failed == 0 ? 0 : 1;
}

}  // namespace check
