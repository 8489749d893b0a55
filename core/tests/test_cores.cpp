// Which cores a process may use, and what a control group leaves of them.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "base/cores.h"
#include "check.h"

namespace {

// Files as the kernel shows them.
class Files {
 public:
  Files() {
    char name[] = "/tmp/phalanx-test-XXXXXX";
    CHECK(mkdtemp(name) != nullptr);
    root_ = name;
  }
  ~Files() {
    const std::string command = "rm -rf " + root_;
    (void)!std::system(command.c_str());
  }
  void directory(const std::string &path) { CHECK(mkdir((root_ + path).c_str(), 0700) == 0); }
  void file(const std::string &path, const std::string &text) { std::ofstream(root_ + path) << text; }
  phx::CpuQuota quota() const { return phx::cpu_quota((root_ + "/membership").c_str(), (root_ + "/mount").c_str()); }

 private:
  std::string root_;
};

TEST(the_cores_of_this_process_are_counted) {
  CHECK(phx::allowed_cores().any());
  CHECK(static_cast<long>(phx::allowed_cores().count()) <= sysconf(_SC_NPROCESSORS_CONF));
}

TEST(without_a_limit_there_is_no_quota) {
  Files files;
  CHECK(files.quota().cores == 0);
  files.directory("/mount");
  files.file("/membership", "0::/job\n");
  files.file("/mount/cpu.max", "max 100000\n");
  CHECK(files.quota().cores == 0);
}

TEST(the_tightest_of_the_groups_above_counts) {
  Files files;
  for (const char *path : {"/mount", "/mount/pod", "/mount/pod/a", "/mount/pod/b"}) files.directory(path);
  files.file("/mount/pod/cpu.max", "250000 100000\n");
  files.file("/mount/pod/a/cpu.max", "800000 100000\n");
  files.file("/mount/pod/b/cpu.max", "50000 100000\n");
  files.file("/membership", "0::/pod/a\n");
  const phx::CpuQuota shared = files.quota();
  CHECK(shared.cores == 2);
  files.file("/membership", "0::/pod/b\n");
  const phx::CpuQuota own = files.quota();
  CHECK(own.cores == 1 && own.granted != shared.granted);
}

TEST(a_container_that_sees_its_group_as_the_root_has_that_quota) {
  Files files;
  files.directory("/mount");
  files.file("/mount/cpu.max", "300000 100000\n");
  files.file("/membership", "0::/docker/0123\n");
  CHECK(files.quota().cores == 3);
}

TEST(the_older_kind_of_control_groups_is_read_too) {
  Files files;
  for (const char *path : {"/mount", "/mount/cpu", "/mount/cpu/job"}) files.directory(path);
  files.file("/mount/cpu/cpu.cfs_quota_us", "-1\n");
  files.file("/mount/cpu/cpu.cfs_period_us", "100000\n");
  files.file("/mount/cpu/job/cpu.cfs_quota_us", "400000\n");
  files.file("/mount/cpu/job/cpu.cfs_period_us", "100000\n");
  files.file("/membership", "3:cpuset:/\n4:cpu,cpuacct:/job\n");
  CHECK(files.quota().cores == 4);
}

}  // namespace

int main(int argc, char **argv) { return check::run_all(argc, argv); }
