// The store in a file: whose file it takes, what survives in it, and what damage to it does.
#include <fcntl.h>
#include <sys/file.h>

#include <random>
#include <thread>

#include "store_fixtures.h"

namespace {

using namespace fixtures;

std::string read_file(const std::string &path) {
  FILE *file = std::fopen(path.c_str(), "rb");
  CHECK(file != nullptr);
  std::string bytes(1 << 20, '\0');
  bytes.resize(std::fread(&bytes[0], 1, bytes.size(), file));
  std::fclose(file);
  return bytes;
}

void write_file(const std::string &path, const std::string &bytes, mode_t mode = 0600) {
  unlink(path.c_str());
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
  CHECK(fd >= 0 && fchmod(fd, mode) == 0);
  CHECK(write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  close(fd);
}

TEST(the_file_is_made_for_its_owner_alone) {
  TemporaryDirectory directory;
  Store store = file_store(directory.file("store"));
  struct stat info;
  CHECK(stat(directory.file("store").c_str(), &info) == 0);
  CHECK((info.st_mode & 07777) == 0600);
}

TEST(keys_outlive_the_handles_that_set_them) {
  TemporaryDirectory directory;
  {
    Store store = file_store(directory.file("store"));
    set(store, "key", "value");
    set(store, "gone", "value");
    CHECK_OK(phx_store_remove(store, "gone"));
    add(store, "counter", 3);
  }
  Store store = file_store(directory.file("store"));
  CHECK(get(store, "key") == "value");
  CHECK(add(store, "counter", 1) == 4);
  CHECK_FAILS(PHX_ERR_NOT_FOUND, "gone", phx_store_remove(store, "gone"));
}

TEST(a_file_to_which_others_have_access_is_refused) {
  TemporaryDirectory directory;
  phx_store *out = nullptr;
  for (const mode_t mode : {0660, 0606, 0644, 0666}) {
    write_file(directory.file("store"), "", mode);
    CHECK_FAILS(PHX_ERR_PERMISSION, "other users have access", phx_store_file(directory.file("store").c_str(), &out));
  }
  write_file(directory.file("store"), "", 0600);
  Store store = file_store(directory.file("store"));  // an empty one of one's own is as good as none
}

TEST(what_is_no_regular_file_of_the_user_is_refused) {
  TemporaryDirectory directory;
  phx_store *out = nullptr;
  const std::string link = directory.file("link"), pipe = directory.file("pipe");
  CHECK(symlink("/tmp/elsewhere", link.c_str()) == 0);
  CHECK_FAILS(PHX_ERR_SYSTEM, "symbolic link", phx_store_file(link.c_str(), &out));
  CHECK(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK_FAILS(PHX_ERR_INVALID, "not a regular file", phx_store_file(pipe.c_str(), &out));
  CHECK_FAILS(PHX_ERR_SYSTEM, "could not open", phx_store_file(directory.file("no/such/file").c_str(), &out));
  CHECK_FAILS(PHX_ERR_INVALID, "the path is empty", phx_store_file("", &out));
  CHECK_FAILS(PHX_ERR_INVALID, "the path is empty", phx_store_file(nullptr, &out));
  CHECK_FAILS(PHX_ERR_INVALID, "out-parameter", phx_store_file(directory.file("store").c_str(), nullptr));
  if (geteuid() == 0) {  // only root can make a file of another user
    write_file(directory.file("other"), "");
    CHECK(chown(directory.file("other").c_str(), 1, 1) == 0);
    CHECK_FAILS(PHX_ERR_PERMISSION, "belongs to user 1", phx_store_file(directory.file("other").c_str(), &out));
  }
  CHECK(out == nullptr);
}

TEST(a_file_of_something_else_is_refused) {
  TemporaryDirectory directory;
  phx_store *out = nullptr;
  for (const char *bytes : {"x", "0123456789abcde", "a text that is longer than any header of ours\n"}) {
    write_file(directory.file("store"), bytes);
    CHECK_FAILS(PHX_ERR_INVALID, "damaged, or is not the file of a store",
                phx_store_file(directory.file("store").c_str(), &out));
    CHECK(read_file(directory.file("store")) == bytes);
  }
}

// Opens the bytes as a store and uses it; only clear errors are allowed.
void use_damaged(const std::string &path, const std::string &bytes) {
  write_file(path, bytes);
  phx_store *opened = nullptr;
  if (phx_store_file(path.c_str(), &opened) != PHX_OK) {
    CHECK(std::strstr(phx_last_error(), path.c_str()) != nullptr);
    return;
  }
  Store store(opened);
  for (const char *key : {"first", "second", "counter"}) {
    std::string buffer(4096, '\0');
    size_t size = 0;
    const phx_status status = phx_store_get(store, key, &buffer[0], buffer.size(), &size, 1);
    CHECK(status == PHX_OK || status == PHX_ERR_TIMEOUT || status == PHX_ERR_INVALID);
    // A checksum covers every byte that counts: a value is right or it is not given.
    if (status == PHX_OK && std::string(key) == "first") CHECK(buffer.substr(0, size) == "value of the first");
  }
}

TEST(a_file_with_any_byte_changed_or_cut_off_gives_right_values_or_an_error) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  {
    Store store = file_store(path);
    set(store, "first", "value of the first");
    set(store, "second", std::string(100, 's'));
    add(store, "counter", 1);
  }
  const std::string good = read_file(path);
  for (size_t i = 0; i < good.size(); ++i) {
    std::string bad = good;
    bad[i] = static_cast<char>(bad[i] ^ 0x41);
    use_damaged(path, bad);
    bad[i] = '\xff';
    use_damaged(path, bad);
    use_damaged(path, good.substr(0, i));
  }
  std::mt19937 random(1);
  for (int round = 0; round < 100; ++round) {
    std::string bad = good.substr(0, 16);
    for (int i = 0; i < 300; ++i) bad.push_back(static_cast<char>(random()));
    bad[8] = static_cast<char>(bad.size());
    bad[9] = static_cast<char>(bad.size() >> 8);
    use_damaged(path, bad);
  }
}

TEST(bytes_after_the_committed_ones_are_those_of_a_dead_writer_and_are_overwritten) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  {
    Store store = file_store(path);
    set(store, "first", "1");
  }
  write_file(path, read_file(path) + std::string(500, '\xee'));
  Store store = file_store(path);
  set(store, "second", "2");
  CHECK(get(store, "first") == "1" && get(store, "second") == "2");
  Store again = file_store(path);
  CHECK(get(again, "second") == "2");
}

TEST(a_file_that_is_cut_while_it_is_open_gives_an_error) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  Store store = file_store(path);
  set(store, "key", "value");
  CHECK(get(store, "key") == "value");
  for (const off_t size : {off_t{40}, off_t{10}, off_t{0}}) {
    CHECK(truncate(path.c_str(), size) == 0);
    size_t read = 0;
    CHECK_FAILS(PHX_ERR_INVALID, "damaged", phx_store_get(store, "key", nullptr, 0, &read, kShortMs));
    CHECK_FAILS(PHX_ERR_INVALID, "damaged", phx_store_set(store, "other", "x", 1));
  }
}

TEST(an_unlinked_file_serves_those_that_have_it_open) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  Store a = file_store(path), b = file_store(path);
  CHECK(unlink(path.c_str()) == 0);
  set(a, "key", "value");
  CHECK(get(b, "key") == "value");
}

TEST(a_lock_that_somebody_keeps_ends_a_get_with_a_timeout) {
  TemporaryDirectory directory;
  const std::string path = directory.file("store");
  Store store = file_store(path);
  set(store, "key", "value");
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0);
  size_t size = 0;
  CHECK_FAILS(PHX_ERR_TIMEOUT, "the lock of", phx_store_get(store, "key", nullptr, 0, &size, kShortMs));
  close(fd);
  CHECK(get(store, "key") == "value");
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
