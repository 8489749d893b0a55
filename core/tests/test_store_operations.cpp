// What every kind of store does alike, through the C functions.
#include <atomic>
#include <climits>
#include <thread>

#include "store_fixtures.h"

namespace {

using namespace fixtures;

TEST(a_value_is_read_as_it_was_set_through_any_handle) {
  for_each_kind([](phx_store *a, phx_store *b) {
    const std::string binary("\0\x01zero\0bytes\xff", 13);
    set(a, "key", binary);
    CHECK(get(b, "key") == binary);
    set(b, "key", "another");
    CHECK(get(a, "key") == "another");
    set(a, "empty", "");
    CHECK(get(b, "empty").empty());
    CHECK_OK(phx_store_set(a, "null", nullptr, 0));
    CHECK(get(b, "null").empty());
    std::string large(3 << 20, 'x');
    for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31 >> 3);
    set(a, "large", large);
    CHECK(get(b, "large") == large);
  });
}

TEST(get_copies_what_fits_and_tells_the_whole_length) {
  for_each_kind([](phx_store *a, phx_store *b) {
    set(a, "key", "0123456789");
    char buffer[6] = "-----";
    size_t size = 99;
    CHECK_OK(phx_store_get(b, "key", buffer, 4, &size, kLongMs));
    CHECK(size == 10 && std::string(buffer) == "0123-");
    CHECK_OK(phx_store_get(b, "key", nullptr, 0, &size, kLongMs));
    CHECK(size == 10);
  });
}

TEST(get_waits_until_another_handle_sets_the_key) {
  for_each_kind([](phx_store *a, phx_store *b) {
    if (a == b) return;  // the wrapped one gives up at once; the memory store has a test of its own
    std::thread setter([&] {
      get(b, "started");
      set(b, "late", "value");
    });
    set(a, "started", "");
    const std::string value = get(a, "late");
    setter.join();
    CHECK(value == "value");
  });
}

TEST(get_waits_until_another_thread_sets_the_key_of_a_memory_store) {
  Store store = memory_store();
  std::thread setter([&] {
    get(store, "started");
    set(store, "late", "value");
  });
  set(store, "started", "");
  const std::string value = get(store, "late");
  setter.join();
  CHECK(value == "value");
}

TEST(a_key_that_never_comes_times_out_with_its_name_and_the_milliseconds) {
  for_each_kind([](phx_store *a, phx_store *) {
    char buffer[4] = "abc";
    size_t size = 77;
    CHECK_FAILS(PHX_ERR_TIMEOUT, "nowhere", phx_store_get(a, "nowhere", buffer, sizeof buffer, &size, kShortMs));
    CHECK(std::strstr(phx_last_error(), "30 ms") != nullptr);
    CHECK(std::strstr(phx_last_error(), "store_get") != nullptr);
    CHECK(size == 77 && std::string(buffer) == "abc");
    const char *keys[] = {"here", "nowhere"};
    set(a, "here", "");
    CHECK_FAILS(PHX_ERR_TIMEOUT, "nowhere", phx_store_wait(a, keys, 2, kShortMs));
    CHECK(std::strstr(phx_last_error(), "30 ms") != nullptr);
  });
}

TEST(wait_returns_when_all_keys_are_set) {
  for_each_kind([](phx_store *a, phx_store *b) {
    CHECK_OK(phx_store_wait(a, nullptr, 0, kShortMs));
    set(b, "one", "1");
    const char *keys[] = {"one", "two", "three"};
    set(b, "two", "");
    if (a == b) {
      set(b, "three", "3");
      CHECK_OK(phx_store_wait(a, keys, 3, kLongMs));
      return;
    }
    std::thread setter([&] { set(b, "three", "3"); });
    const phx_status status = phx_store_wait(a, keys, 3, kLongMs);
    setter.join();
    CHECK(status == PHX_OK);
  });
}

TEST(add_counts_from_zero_and_keeps_a_decimal_text) {
  for_each_kind([](phx_store *a, phx_store *b) {
    CHECK(add(a, "counter", 5) == 5);
    CHECK(add(b, "counter", -7) == -2);
    CHECK(get(a, "counter") == "-2");
    set(a, "given", "40");
    CHECK(add(b, "given", 2) == 42);
    CHECK(add(a, "untouched", 0) == 0);
    CHECK(get(b, "untouched") == "0");
  });
}

TEST(concurrent_adds_lose_nothing) {
  for_each_kind([](phx_store *a, phx_store *b) {
    constexpr int kThreads = 4, kAdds = 50;
    std::atomic<int64_t> sum{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
      threads.emplace_back([&, t] {
        for (int i = 0; i < kAdds; ++i) {
          int64_t result = 0;
          if (phx_store_add(t % 2 == 0 ? a : b, "counter", 1, &result) == PHX_OK) sum += result;
        }
      });
    for (std::thread &thread : threads) thread.join();
    CHECK(get(a, "counter") == std::to_string(kThreads * kAdds));
    // Each value from 1 to n was handed out exactly once.
    CHECK(sum.load() == int64_t{kThreads * kAdds} * (kThreads * kAdds + 1) / 2);
  });
}

TEST(a_removed_key_is_gone_and_can_be_set_again) {
  for_each_kind([](phx_store *a, phx_store *b) {
    set(a, "key", "value");
    CHECK_OK(phx_store_remove(b, "key"));
    CHECK_FAILS(PHX_ERR_NOT_FOUND, "key", phx_store_remove(a, "key"));
    CHECK(std::strstr(phx_last_error(), "store_remove") != nullptr);
    size_t size = 0;
    CHECK_FAILS(PHX_ERR_TIMEOUT, "key", phx_store_get(a, "key", nullptr, 0, &size, kShortMs));
    set(b, "key", "again");
    CHECK(get(a, "key") == "again");
  });
}

TEST(add_refuses_what_is_no_number_and_what_overflows) {
  for_each_kind([](phx_store *a, phx_store *b) {
    int64_t probe = 0;
    // The wrapped store counts for itself.
    if (phx_store_remove(a, "probe") == PHX_ERR_NOT_FOUND && a == b && phx_store_wait(a, nullptr, 0, 1) == PHX_OK) {
      set(a, "probe", "x");
      if (phx_store_add(a, "probe", 0, &probe) == PHX_OK) return;
    }
    const std::string wrong[] = {"", "text", "1 ", " 1", "1.5", "+1", "9223372036854775808", std::string("1\0", 2)};
    for (const std::string &text : wrong) {
      int64_t result = 123;
      set(a, "text", text);
      CHECK_FAILS(PHX_ERR_INVALID, "not a decimal", phx_store_add(b, "text", 1, &result));
      CHECK(result == 123 && get(b, "text") == text);
    }
    CHECK(add(a, "big", INT64_MAX) == INT64_MAX);
    int64_t result = 123;
    CHECK_FAILS(PHX_ERR_INVALID, "range", phx_store_add(b, "big", 1, &result));
    CHECK(result == 123 && get(a, "big") == std::to_string(INT64_MAX));
    CHECK(add(a, "small", INT64_MIN) == INT64_MIN);
    CHECK_FAILS(PHX_ERR_INVALID, "range", phx_store_add(b, "small", -1, &result));
  });
}

TEST(wrong_arguments_are_refused_by_the_name_of_the_call) {
  for_each_kind([](phx_store *a, phx_store *) {
    size_t size = 5;
    int64_t result = 5;
    char byte = 0;
    const std::string long_key(1025, 'k');
    const char *keys[] = {"fine", ""};
    const char *null_keys[] = {nullptr};
    CHECK_FAILS(PHX_ERR_INVALID, "store_set: the store is NULL", phx_store_set(nullptr, "k", "", 0));
    CHECK_FAILS(PHX_ERR_INVALID, "store_get: the store is NULL", phx_store_get(nullptr, "k", &byte, 1, &size, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_wait: the store is NULL", phx_store_wait(nullptr, keys, 1, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_add: the store is NULL", phx_store_add(nullptr, "k", 1, &result));
    CHECK_FAILS(PHX_ERR_INVALID, "store_remove: the store is NULL", phx_store_remove(nullptr, "k"));
    CHECK_FAILS(PHX_ERR_INVALID, "store_set: the key is NULL", phx_store_set(a, nullptr, "", 0));
    CHECK_FAILS(PHX_ERR_INVALID, "store_get: the key is empty", phx_store_get(a, "", &byte, 1, &size, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "more than 1024 bytes", phx_store_add(a, long_key.c_str(), 1, &result));
    CHECK_FAILS(PHX_ERR_INVALID, "store_remove: the key is NULL", phx_store_remove(a, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "store_set: the value is NULL", phx_store_set(a, "k", nullptr, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_get: the buffer is NULL", phx_store_get(a, "k", nullptr, 1, &size, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_get: the out-parameter", phx_store_get(a, "k", &byte, 1, nullptr, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_add: the out-parameter", phx_store_add(a, "k", 1, nullptr));
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -1", phx_store_get(a, "k", &byte, 1, &size, -1));
    CHECK_FAILS(PHX_ERR_INVALID, "timeout_ms is -5", phx_store_wait(a, keys, 1, -5));
    CHECK_FAILS(PHX_ERR_INVALID, "the array of keys is NULL", phx_store_wait(a, nullptr, 1, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_wait: the key is empty", phx_store_wait(a, keys, 2, 1));
    CHECK_FAILS(PHX_ERR_INVALID, "store_wait: the key is NULL", phx_store_wait(a, null_keys, 1, 1));
    CHECK(size == 5 && result == 5);
  });
}

TEST(the_longest_key_and_value_are_taken_and_longer_ones_are_not) {
  const std::string value(16 << 20, 'v');
  for_each_kind([&](phx_store *a, phx_store *b) {
    const std::string key(1024 - 4, 'k');  // a prefix store adds four
    set(a, key, value);
    CHECK(get(b, key) == value);
    CHECK_FAILS(PHX_ERR_INVALID, "at most", phx_store_set(a, "key", value.data(), value.size() + 1));
  });
}

TEST(a_timeout_of_zero_means_the_default) {
  for_each_kind([](phx_store *a, phx_store *b) {
    set(a, "key", "value");
    CHECK(get(b, "key", 0) == "value");
    const char *keys[] = {"key"};
    CHECK_OK(phx_store_wait(b, keys, 1, 0));
  });
}

TEST(a_retained_store_lives_until_its_last_release) {
  for_each_kind([](phx_store *a, phx_store *) {
    CHECK(phx_store_retain(a) == a);
    phx_store_release(a);
    set(a, "key", "value");
    CHECK(get(a, "key") == "value");
  });
  CHECK(phx_store_retain(nullptr) == nullptr);
  phx_store_release(nullptr);
}

TEST(two_hundred_stores_of_each_kind_leave_no_descriptor_behind) {
  TemporaryDirectory directory;
  const int before = open_descriptors();
  for (int i = 0; i < 200; ++i) {
    uint16_t port = 0;
    Store server = serve(&port);
    Store client = connect_to(port);
    Store file = file_store(directory.file("store"));
    Store prefix;
    CHECK_OK(phx_store_prefix(client, "p", prefix.out()));
    set(prefix, "key", "value");
    CHECK(get(server, "pkey") == "value");
    add(file, "count", 1);
  }
  CHECK(open_descriptors() == before);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
